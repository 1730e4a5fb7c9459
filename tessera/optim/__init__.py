"""Optimizers: how each updates a parameter, as formulas that become part of a compiled step, and Lion."""

from tessera.optim.adam import ADAM
from tessera.optim.lion import LION, Lion
from tessera.optim.rule import Rule, rule_of
from tessera.optim.scaled import ADADELTA, ADAMAX, RADAM, RMSPROP
from tessera.optim.sgd import SGD

RULES = (SGD, ADAM, LION, RMSPROP, ADADELTA, ADAMAX, RADAM)

__all__ = ["ADADELTA", "ADAM", "ADAMAX", "LION", "RADAM", "RMSPROP", "RULES", "SGD", "Lion", "Rule", "rule_of"]
