"""ai.onnx.ml: ensembles of trees, all rows and trees at once, one level a step.

In: the tables of a file. Out: a `_Forest`, whose children point forward only, so that a walk ends after its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera.frontends.onnx.errors import OnnxError
from tessera.frontends.onnx.interpreter import Context
from tessera.frontends.onnx.operators.allocation import allowed
from tessera.frontends.onnx.operators.ml_models import labelled, transformed
from tessera.frontends.onnx.registry import ML, operator
from tessera.frontends.onnx.values import literal, numbers

Tensor = torch.Tensor
_LEQ, _LT, _GTE, _GT, _EQ, _NEQ, _MEMBER = range(7)
_MODES = {"BRANCH_LEQ": 0, "BRANCH_LT": 1, "BRANCH_GTE": 2, "BRANCH_GT": 3, "BRANCH_EQ": 4, "BRANCH_NEQ": 5}
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
_TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


@dataclass(frozen=True)
class _Forest:
    """Nodes by number; a leaf is its own child."""

    roots: list[int]
    features: list[int]
    modes: list[int]
    values: list[float]
    true: list[int]
    false: list[int]
    missing: list[int]
    weights: dict[int, list[tuple[int, float]]]  # of a leaf: targets and what they get
    members: dict[int, list[float]]
    depth: int

    @staticmethod
    def of(roots: list[int], tables: Sequence[list], weights: dict, members: dict | None = None) -> _Forest:
        features, modes, values, true, false, missing = tables
        count = len(true)
        if any(not 0 <= n < count for n in (*true, *false, *roots)):
            raise OnnxError(f"a tree refers to a node that is none of its {count}")
        return _Forest(
            roots, features, modes, values, true, false, missing, weights, members or {}, _depth(roots, true, false)
        )

    def scores(self, x: Tensor, targets: int, aggregate: str, base: list[float] | None) -> Tensor:
        device, dtype = x.device, x.dtype if x.dtype == torch.float64 else torch.float32
        x = x.to(dtype).reshape(-1, x.shape[-1])

        def table(listed: list, kind: torch.dtype = torch.int64) -> Tensor:
            return literal(listed, kind).to(device)

        place = table(self.roots).expand(x.shape[0], len(self.roots))
        features, modes, values = table(self.features), table(self.modes), table(self.values, dtype)
        true, false, missing = table(self.true), table(self.false), table(self.missing, torch.bool)
        sets = self.member_table(dtype, device)
        for _ in range(self.depth):
            element, mode, value = x.gather(1, features[place]), modes[place], values[place]
            taken = torch.where(mode == _LT, element < value, element <= value)
            for kind, other in (
                (_GTE, element >= value),
                (_GT, element > value),
                (_EQ, element == value),
                (_NEQ, element != value),
            ):
                taken = torch.where(mode == kind, other, taken)
            if sets is not None:
                taken = torch.where(mode == _MEMBER, (sets[place] == element.unsqueeze(-1)).any(-1), taken)
            taken = taken | (torch.isnan(element) & missing[place])
            place = torch.where(taken, true[place], false[place])
        return self.gathered(place, targets, aggregate, base, dtype)

    def member_table(self, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        if not self.members:
            return None
        width = max(map(len, self.members.values()))
        rows = [
            [*m, *[float("nan")] * (width - len(m))] for m in (self.members.get(i, []) for i in range(len(self.true)))
        ]
        return literal(rows, dtype).to(device)

    def gathered(
        self, place: Tensor, targets: int, aggregate: str, base: list[float] | None, dtype: torch.dtype
    ) -> Tensor:
        """What the leaves that were reached give to each target."""
        gains = [[0.0] * targets for _ in self.true]
        given = [[False] * targets for _ in self.true]
        for leaf, listed in self.weights.items():
            for target, weight in listed:
                if not 0 <= target < targets:
                    raise OnnxError(f"a leaf gives to target {target} of {targets}")
                gains[leaf][target] += weight
                given[leaf][target] = True
        each = literal(gains, dtype).to(place.device)[place]  # [rows, trees, targets]
        if aggregate in ("MIN", "MAX"):
            there = literal(given, torch.bool).to(place.device)[place]
            worst = float("inf") if aggregate == "MIN" else float("-inf")
            values = torch.where(there, each, worst)
            total = values.amin(1) if aggregate == "MIN" else values.amax(1)
            total = torch.where(there.any(1), total, 0.0)
        else:
            total = each.sum(1) / (len(self.roots) if aggregate == "AVERAGE" else 1)
        return total if not base else total + literal(base, dtype).to(place.device)


def _depth(roots: list[int], true: list[int], false: list[int]) -> int:
    """The longest way from a root to a leaf; a way that comes back has none."""
    level, depth = set(roots), 0
    while any(true[n] != n or false[n] != n for n in level):
        level = {child for n in level for child in (true[n], false[n])}
        depth += 1
        if depth > len(true):
            raise OnnxError("the nodes of a tree form a circle")
    return depth


@operator("TreeEnsemble", 5, domain=ML)
def tree_ensemble(
    x: Tensor,
    *,
    aggregate_function: int = 1,
    leaf_targetids: list[int],
    leaf_weights: Tensor,
    membership_values: Tensor | None = None,
    n_targets: int,
    context: Context,
    nodes_falseleafs: list[int],
    nodes_falsenodeids: list[int],
    nodes_featureids: list[int],
    nodes_hitrates: Tensor | None = None,
    nodes_missing_value_tracks_true: list[int] | None = None,
    nodes_modes: Tensor,
    nodes_splits: Tensor,
    nodes_trueleafs: list[int],
    nodes_truenodeids: list[int],
    post_transform: int = 0,
    tree_roots: list[int],
) -> Tensor:
    inner, leaves = len(nodes_featureids), len(leaf_targetids)
    true = [n + inner * leaf for n, leaf in zip(nodes_truenodeids, nodes_trueleafs, strict=True)]
    false = [n + inner * leaf for n, leaf in zip(nodes_falsenodeids, nodes_falseleafs, strict=True)]
    own = list(range(inner, inner + leaves))
    modes = [int(m) for m in numbers(nodes_modes)]
    sets, members_of = numbers(membership_values) if membership_values is not None else [], {}
    rest = iter(sets)
    for node in (i for i, m in enumerate(modes) if m == _MEMBER):
        members = []
        for v in rest:
            if v != v:  # a NaN ends the set
                break
            members.append(v)
        members_of[node] = members
    zeros = [0] * leaves
    tables = (
        [*nodes_featureids, *zeros],
        [*modes, *zeros],
        [*numbers(nodes_splits), *zeros],
        [*true, *own],
        [*false, *own],
        [*(nodes_missing_value_tracks_true or [0] * inner), *zeros],
    )
    weights = {inner + i: [(t, w)] for i, (t, w) in enumerate(zip(leaf_targetids, numbers(leaf_weights), strict=True))}
    forest = _Forest.of(tree_roots, tables, weights, members_of)
    allowed([len(forest.true), n_targets], 8, context)
    scores = forest.scores(x, n_targets, _AGGREGATES[aggregate_function], None)
    return transformed(scores, _TRANSFORMS[post_transform])


def _older(
    trees: list[int],
    ids: list[int],
    features: list[int],
    modes: list[str],
    values: list[float],
    true: list[int],
    false: list[int],
    missing: list[int] | None,
    targets: Sequence[list],
) -> _Forest:
    """A forest by the tables of the operators before TreeEnsemble."""
    number = {key: i for i, key in enumerate(zip(trees, ids, strict=True))}
    roots: dict[int, int] = {}
    kinds, t, f = [], [], []
    for i, (tree, mode) in enumerate(zip(trees, modes, strict=True)):
        roots.setdefault(tree, i)
        leaf = mode == "LEAF"
        if not leaf and mode not in _MODES:
            raise OnnxError(f"nodes_modes: unknown {mode!r}")
        kinds.append(0 if leaf else _MODES[mode])
        try:
            t.append(i if leaf else number[tree, true[i]])
            f.append(i if leaf else number[tree, false[i]])
        except KeyError as error:
            raise OnnxError(f"tree {tree} refers to a node {error} that it does not have") from error
    weights: dict[int, list] = {}
    for tree, node, target, weight in zip(*targets, strict=True):
        if (tree, node) not in number:
            raise OnnxError(f"a weight of node {node} of tree {tree}, which is not there")
        weights.setdefault(number[tree, node], []).append((target, weight))
    tables = (features, kinds, values, t, f, missing or [0] * len(ids))
    return _Forest.of(list(roots.values()), tables, weights)


def _floats(plain: list[float] | None, tensor: Tensor | None) -> list[float]:
    return numbers(tensor) if tensor is not None else plain or []


@operator("TreeEnsembleRegressor", domain=ML)
def tree_ensemble_regressor(
    x: Tensor,
    *,
    aggregate_function: str = "SUM",
    base_values: list[float] | None = None,
    base_values_as_tensor: Tensor | None = None,
    n_targets: int = 1,
    context: Context,
    nodes_falsenodeids: list[int],
    nodes_featureids: list[int],
    nodes_hitrates: list[float] | None = None,
    nodes_hitrates_as_tensor: Tensor | None = None,
    nodes_missing_value_tracks_true: list[int] | None = None,
    nodes_modes: list[str],
    nodes_nodeids: list[int],
    nodes_treeids: list[int],
    nodes_truenodeids: list[int],
    nodes_values: list[float] | None = None,
    nodes_values_as_tensor: Tensor | None = None,
    post_transform: str = "NONE",
    target_ids: list[int],
    target_nodeids: list[int],
    target_treeids: list[int],
    target_weights: list[float] | None = None,
    target_weights_as_tensor: Tensor | None = None,
) -> Tensor:
    forest = _older(
        nodes_treeids,
        nodes_nodeids,
        nodes_featureids,
        nodes_modes,
        _floats(nodes_values, nodes_values_as_tensor),
        nodes_truenodeids,
        nodes_falsenodeids,
        nodes_missing_value_tracks_true,
        (target_treeids, target_nodeids, target_ids, _floats(target_weights, target_weights_as_tensor)),
    )
    allowed([len(forest.true), n_targets], 8, context)
    scores = forest.scores(x, n_targets, aggregate_function, _floats(base_values, base_values_as_tensor))
    return transformed(scores.float(), post_transform)


@operator("TreeEnsembleClassifier", domain=ML)
def tree_ensemble_classifier(
    x: Tensor,
    *,
    base_values: list[float] | None = None,
    base_values_as_tensor: Tensor | None = None,
    class_ids: list[int],
    class_nodeids: list[int],
    class_treeids: list[int],
    class_weights: list[float] | None = None,
    class_weights_as_tensor: Tensor | None = None,
    classlabels_int64s: list[int] | None = None,
    classlabels_strings: list[str] | None = None,
    nodes_falsenodeids: list[int],
    nodes_featureids: list[int],
    nodes_hitrates: list[float] | None = None,
    nodes_hitrates_as_tensor: Tensor | None = None,
    nodes_missing_value_tracks_true: list[int] | None = None,
    nodes_modes: list[str],
    nodes_nodeids: list[int],
    nodes_treeids: list[int],
    nodes_truenodeids: list[int],
    nodes_values: list[float] | None = None,
    nodes_values_as_tensor: Tensor | None = None,
    post_transform: str = "NONE",
) -> tuple[object, Tensor]:
    weights = _floats(class_weights, class_weights_as_tensor)
    forest = _older(
        nodes_treeids,
        nodes_nodeids,
        nodes_featureids,
        nodes_modes,
        _floats(nodes_values, nodes_values_as_tensor),
        nodes_truenodeids,
        nodes_falsenodeids,
        nodes_missing_value_tracks_true,
        (class_treeids, class_nodeids, class_ids, weights),
    )
    names = classlabels_strings or classlabels_int64s or []
    base = _floats(base_values, base_values_as_tensor)
    if len(names) == 2 and len(set(class_ids)) == 1:  # one score tells both
        scores = forest.scores(x, max(class_ids) + 1, "SUM", None)[:, -1:] + (base[-1] if base else 0.0)
        positive = all(w >= 0 for w in weights)
        places = (scores[:, 0] > (0.5 if positive else 0.0)).to(torch.int64)
        if post_transform == "NONE":
            both = torch.cat([1 - scores, scores] if positive else [-scores, scores], 1)
        else:
            both = transformed(torch.cat([-scores, scores], 1), post_transform)
        return labelled(places, classlabels_int64s, classlabels_strings), both.float()
    scores = forest.scores(x, len(names), "SUM", base)
    places = scores.argmax(1)
    return labelled(places, classlabels_int64s, classlabels_strings), transformed(scores, post_transform).float()
