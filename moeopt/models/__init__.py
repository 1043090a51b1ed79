"""From a model's ``config.json`` to the shape of its MoE layer, as an engine will ask for it."""

from moeopt.models.derive import Derivation, shape_from_model
from moeopt.models.families import FAMILIES, Family, family_table
from moeopt.models.lookup import DerivedValue

__all__ = ["FAMILIES", "Derivation", "DerivedValue", "Family", "family_table", "shape_from_model"]
