"""Optimizers: how each updates a parameter, as formulas that become part of a compiled step, and Lion."""

from tessera.optim.adam import ADAM
from tessera.optim.lion import LION, Lion
from tessera.optim.rule import Rule, rule_of
from tessera.optim.sgd import SGD

RULES = (SGD, ADAM, LION)

__all__ = ["ADAM", "LION", "RULES", "SGD", "Lion", "Rule", "rule_of"]
