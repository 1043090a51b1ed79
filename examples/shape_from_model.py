"""The shape of a model's MoE layers on one GPU, and the key that each number came from.

Run it on a model of yours, or with no argument on a small config.json that it writes itself:

    python examples/shape_from_model.py [DIR_OR_CONFIG_JSON] [--tp 4] [--engine sglang]
"""

import argparse
import json
import tempfile
from pathlib import Path

from moeopt.models import shape_from_model

# What Qwen3-30B-A3B's config.json says of its MoE layers.
EXAMPLE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "torch_dtype": "bfloat16",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--engine", default="sglang")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as directory:
        path = args.model
        if path is None:
            path = Path(directory) / "config.json"
            path.write_text(json.dumps(EXAMPLE))
        shape, derivation = shape_from_model(path, engine=args.engine, tp=args.tp)
    print("\n".join(derivation.lines))
    print(f"\n{shape}\n{shape.slug()}")


if __name__ == "__main__":
    main()
