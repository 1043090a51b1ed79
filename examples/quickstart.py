"""Tunes one shape and writes the files SGLang reads: on the GPU here, or replaying a recording.

python examples/quickstart.py                       # on cuda:0
python examples/quickstart.py recorded:h200-E256-top8-K3072-N256-bf16.jsonl.gz
"""

import sys
import tempfile

import moeopt

shape = moeopt.MoEShape(num_experts=256, top_k=8, hidden_size=3072, intermediate_size=256, dtype="bf16")
gpu = sys.argv[1] if len(sys.argv) > 1 else None

result = moeopt.tune(shape, [16, 64, 256], gpu=gpu, trials=24, timeout="2m")
for batch_size in result.batch_sizes:
    best = result.best(batch_size)
    print(f"M={batch_size}: up {best.up.config} {best.up.us:.1f} µs, down {best.down.config} {best.down.us:.1f} µs")

directory = tempfile.mkdtemp(prefix="moeopt-")
for path in result.export("sglang", directory):
    print("wrote", path)
