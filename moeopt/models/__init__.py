"""Shapes of MoE layers from a model's ``config.json``, as an engine will ask for them."""

from moeopt.core.shape import MoEShape, set_model_reader
from moeopt.models.derive import Derivation, shape_from_model
from moeopt.models.families import FAMILIES, Family, family_table
from moeopt.models.lookup import DerivedValue

__all__ = ["FAMILIES", "Derivation", "DerivedValue", "Family", "MoEShape", "family_table", "shape_from_model"]

set_model_reader(lambda path, **options: shape_from_model(path, **options)[0])
