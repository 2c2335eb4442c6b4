"""Reductions of replicas' values, and the rules by which variables keep their copies in sync."""

from __future__ import annotations

import enum
from typing import NoReturn

from dmesh.errors import StrategyTypeError, StrategyValueError

__all__ = ["ReduceOp", "VariableAggregation", "VariableSynchronization", "as_reduce_op"]


class ReduceOp(enum.Enum):
    """Reduction of the values of all replicas to one."""

    SUM = "SUM"
    """They are added."""
    MEAN = "MEAN"
    """The mean of the values."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise StrategyValueError(f"{value!r:.200} is not a valid ReduceOp: use SUM or MEAN")

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Return the reduction of an aggregation.

        Raises:
            StrategyValueError: It stands for none.
        """
        if aggregation is VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation is VariableAggregation.MEAN:
            return ReduceOp.MEAN
        raise StrategyValueError(
            f"{aggregation} is no reduction, so there is no single value of all replicas: give the variable "
            "aggregation=VariableAggregation.SUM or MEAN"
        )


class VariableSynchronization(enum.Enum):
    """Time at which the copies of a variable are combined."""

    AUTO = 0
    """The strategy's default: on write."""
    NONE = 1
    """Never; dmesh's strategies refuse it."""
    ON_WRITE = 2
    """At every assignment, so that all replicas have the same value at all times."""
    ON_READ = 3
    """On reads outside of replicas; each replica has a value of its own until then."""


class VariableAggregation(enum.Enum):
    """Reduction of the values that replicas assign to a variable, or of its copies."""

    NONE = 0
    """Not at all."""
    SUM = 1
    """They are added."""
    MEAN = 2
    """They are averaged."""
    ONLY_FIRST_REPLICA = 3
    """The value of replica 0 counts."""


def as_reduce_op(op: ReduceOp | str) -> ReduceOp:
    """Return a reduction from a member or its name, in upper or lower case.

    Raises:
        StrategyTypeError: It is neither.
        StrategyValueError: There is no such reduction.
    """
    if isinstance(op, str):
        return ReduceOp(op.upper())
    if not isinstance(op, ReduceOp):
        raise StrategyTypeError(f"reduce_op must be a ReduceOp or its name, SUM or MEAN, got {op!r:.200}")
    return op
