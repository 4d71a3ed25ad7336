"""The values that a field takes where it takes one of a few: msgspec refuses others without saying which it wants."""

import functools
from collections.abc import Sequence

from msgspec import inspect

Step = str | int | None


def choices(kind: object, steps: Sequence[Step]) -> list[str]:
    """Give the values allowed at a place, sorted; empty where the field there is no choice among a few.

    Args:
        kind: The type of the whole value.
        steps: The way down: a field's or key's name, a place in a list; None for a key that is not known.
    """
    found = [_type_info(kind)]
    for step in steps:
        found = [below for each in found for below in _below(each, step)]
    values = {str(value) for each in found for value in _values(each)}
    return sorted(values)


@functools.lru_cache(maxsize=64)
def _type_info(kind: object) -> inspect.Type:
    return inspect.type_info(kind)


def _parts(hint: inspect.Type) -> Sequence[inspect.Type]:
    if isinstance(hint, inspect.Metadata):
        return _parts(hint.type)
    return [part for one in hint.types for part in _parts(one)] if isinstance(hint, inspect.UnionType) else [hint]


def _below(hint: inspect.Type, step: Step) -> list[inspect.Type]:
    found: list[inspect.Type] = []
    for part in _parts(hint):
        if isinstance(part, inspect.StructType):
            found += [field.type for field in part.fields if field.encode_name == step]
        elif isinstance(part, inspect.DictType):
            found.append(part.value_type)
        elif isinstance(part, inspect.ListType | inspect.VarTupleType):
            found.append(part.item_type)
    return found


def _values(hint: inspect.Type) -> list[object]:
    found: list[object] = []
    for part in _parts(hint):
        if isinstance(part, inspect.LiteralType):
            found += part.values
        elif isinstance(part, inspect.EnumType):
            found += [member.value for member in part.cls]
    return found
