"""A walk through moeopt on a recording, cell by cell (open it as a notebook in an editor that knows ``# %%``).

python examples/walkthrough.py
"""

# %% A recording stands in for a GPU: times measured earlier, replayed by the same code.
import tempfile
from pathlib import Path

import optuna

import moeopt

RECORDING = "recorded:h200-E256-top8-K3072-N256-bf16.jsonl.gz"
work = Path(tempfile.mkdtemp(prefix="moeopt-"))
storage = f"sqlite:///{work / 'studies.db'}"

# %% Tune every batch size of the recording with at most 12 timed configs for each projection.
result = moeopt.tune(gpu=RECORDING, trials=12, storage=storage, progress=False)
print(
    f"{result.counts.measured} configs timed, geometric-mean speed-up {result.geomean_speedup() or float('nan'):.2f}x"
)

# %% Again: everything is in the study database, nothing is timed.
again = moeopt.tune(gpu=RECORDING, trials=12, storage=storage, progress=False)
print(f"{again.counts.measured} timed, {again.counts.resumed} from the database")
assert again.rows == result.rows

# %% More trials go on from there.
more = moeopt.tune(gpu=RECORDING, trials=24, storage=storage, progress=False)
print(f"{more.counts.measured} more timed")

# %% Each (projection, batch size) is an Optuna study.
study = more.study("up", 64)
print(study.study_name, len(study.trials), "trials")
done = [t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE]
print("best", min(done, key=lambda t: t.value).params)

# %% The same loop with any Optuna sampler.
tpe = moeopt.tune(
    gpu=RECORDING,
    trials=12,
    sampler=optuna.samplers.TPESampler(seed=0, multivariate=True),
    storage=f"sqlite:///{work / 'tpe.db'}",
    progress=False,
)
for m in more.batch_sizes:
    print(f"M={m}: {more.best(m).total_us:.1f} µs, with TPE and 12 trials {tpe.best(m).total_us:.1f} µs")

# %% Files that SGLang reads, and a page to look at.
for path in more.export("sglang", work / "sglang"):
    print("wrote", path)
print("wrote", more.report(work / "report.html"))
