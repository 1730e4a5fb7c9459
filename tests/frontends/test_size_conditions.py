"""From which size on a condition holds: by arithmetic, beside trying sizes one by one."""

from __future__ import annotations

import random

import pytest

from tessera.frontends.size_conditions import holds_from

TRIED = 600
NAMES = {"__builtins__": {}, "Max": max, "min": min, "Mod": lambda a, b: a % b}


@pytest.mark.parametrize(
    ("condition", "first"),
    [
        ("n - 1 != 1", 3),
        ("n != 4096", 4097),  # no number of sizes that are tried is enough
        ("n * n > 1000 * n", 1001),
        ("-n < -7", 8),
        ("n // 3 * 3 > 100 and n % 2 >= 0", 102),
        ("Mod(n, 4) < 4", 1),
        ("3 <= n <= 9 or n > 5", 3),
        ("n ** 2 >= 16", 4),
        ("30 <= n and n <= IntInfinity()", 30),  # an end that is none
        ("((-1) + (n // 10))*((-1) + (n // 10)) > 1", 30),
        ("n >= IntInfinity()", None),
        ("not n < 5", 5),
        ("Max(n, 8) == n", 8),
        ("2*n == math.trunc(2.0*torch.sym_float(n))", 1),  # what resizing images asks
        ("math.floor(torch.sym_float(n)*1.5) > 8", 6),
        ("math.ceil(n / 2) >= 0 and math.ceil(n / 2) <= n", 1),  # what half of a sequence asks
        ("math.ceil(n / 3) != 2", 7),
        ("math.ceil(1.5*torch.sym_float(n)) <= 2*n and math.ceil(7 / n) < 3", None),
        ("math.ceil(1.5*torch.sym_float(n)) < 2*n", 2),
        ("math.ceil(torch.sym_float(n)*1.5) == 2*n", None),
        ("math.floor(n / 4) > math.trunc(n / 5) - 1", 1),
        ("math.trunc(n + 0.5) > 0", None),
        ("math.trunc(0.1*torch.sym_float(n)) > 8", None),  # no such float is a tenth
        ("math.trunc(1e300*torch.sym_float(n)) > 8", None),
        ("n % 2 == 0", None),  # never for all
        ("n < 600", None),
        ("n > 10 ** 9", None),  # too far to look at all below
        ("n % 4099 != 1 // 4099", None),  # too many remainders
        ("n // m > 1", None),
        ("9 // n > 1", None),
        ("9 // n < 2", 5),
        ("(1 % (1 + (n // 2))) != 0", 2),  # what scaling a transform asks
        ("(n + 3) % (n * n) == n + 3", 3),
        ("-1 // n == -1", None),
        ("n % 0 == 1", None),
        ("n + 0.5 > 2", None),
        ("n.real > 0", None),
        ("__import__('os') == n", None),
        ("n > ", None),
        ("(" * 200 + "n" + ")" * 200 + " > 1", 2),
        ("-" * 90 + "n < 1", None),
    ],
)
def test_from_which_size_on(condition: str, first: int | None) -> None:
    assert holds_from(condition, 1) == first


def test_a_range_has_an_end() -> None:
    assert holds_from("n < 600", 1, 512) == 1
    assert holds_from("n != 600", 1, 512) == 1
    assert holds_from("n != 512", 1, 512) is None


def expression(rng: random.Random, depth: int) -> str:
    if not depth:
        return rng.choice(["n", "n", str(rng.randint(0, 9))])
    a, b, number = expression(rng, depth - 1), expression(rng, depth - 1), rng.randint(1, 5)
    forms = (f"({a} + {b})", f"({a} - {b})", f"{a} * {b}", f"{a} // {number}", f"Mod({a}, {number})", f"Max({a}, {b})")
    return rng.choice((*forms, f"min({a}, {b})", f"-{a}", f"({number} // (1 + Max({a}, 0)))"))


@pytest.mark.parametrize("seed", range(8))
def test_conditions_at_random(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        sides = [expression(rng, rng.randint(1, 3)) for _ in range(2)]
        condition = f" {rng.choice(['<', '<=', '==', '!=', '>', '>='])} ".join(sides)
        failing = [n for n in range(1, TRIED) if not eval(condition, NAMES, {"n": n})]
        first = holds_from(condition, 1)
        if first is None:
            assert failing and failing[-1] > TRIED - 150  # no period is longer, but those of three divisors
        elif first < TRIED:
            assert first == (failing[-1] + 1 if failing else 1)
