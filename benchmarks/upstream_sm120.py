"""What SGLang and vLLM ship for SM120 parts, held against the rule, the compiler and the cost model.

    python -m benchmarks.upstream_sm120 --compile --json benchmarks/results/upstream-sm120.json

The files are those of the published wheels (fetched once by pip). Of each file:

- configs that the rule of moeopt/resources.py calls illegal for the file's layer;
- with --compile, what becomes of each in the compiler, with the engine's own kernel, for the projections
  that the file is used for. Each binary is compiled once: Triton's cache tells what a binary depends on;
- for each batch size the share of the legal grid that the cost model predicts to be faster than upstream's
  choice (0 % is the model's own first), and the same for the engine's default.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compile_grid import PatientPool
from benchmarks.costmodel import commit
from moeopt.costmodel import predict_us
from moeopt.kernels.base import MoEKernel
from moeopt.kernels.defaults import engine_default
from moeopt.kernels.engine_source import EngineSource
from moeopt.kernels.sglang import SglangKernel
from moeopt.kernels.vllm import VllmKernel
from moeopt.resources import illegal_reason
from moeopt.shape import ROLES, Role
from moeopt.space import LaunchConfig, SearchSpace
from tests.engines import SGLANG, VLLM, engine_source
from tests.sm120_files import ShippedFile, shipped_files
