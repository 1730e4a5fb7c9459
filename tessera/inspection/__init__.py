"""Looking into a compiled function: its programs, an edited one in place of a stage, an account of what happened."""

from tessera.inspection.check import CheckReport, check
from tessera.inspection.edit import edit
from tessera.inspection.explain import Explanation, explain
from tessera.inspection.programs import Stage, Stages, stages, trace
from tessera.inspection.reproduce import reproduce

__all__ = ["CheckReport", "Explanation", "Stage", "Stages", "check", "edit", "explain", "reproduce", "stages", "trace"]
