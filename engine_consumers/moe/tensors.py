"""Tensors by name: what a profile sends and reads, held against what the server says of its model."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from schemas.errors import ConfigError

Values = dict[str, list[Any]]  # flat, by name

ANY = -1


class Tensor(NamedTuple):
    """A tensor of a profile.

    Attributes:
        datatype: As Triton names it.
        dims: Without the batch; `ANY` where the length differs from request to request.
        is_optional: The model may be without it.
    """

    datatype: str
    dims: tuple[int, ...] = (1,)
    is_optional: bool = False


class Given(NamedTuple):
    """A tensor of the server's model; its shape begins with the batch where the model is batched."""

    datatype: str
    shape: tuple[int, ...]
    is_optional: bool = False


class Signature(NamedTuple):
    """What the server says of its model."""

    inputs: dict[str, Given]
    outputs: dict[str, Given]
    is_decoupled: bool


def signature(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> Signature:
    """Read Triton's metadata and configuration of a model, as JSON."""
    optional = {one["name"] for one in config.get("input", []) if one.get("optional")}

    def given(tensors: list[dict[str, Any]]) -> dict[str, Given]:
        return {
            one["name"]: Given(one["datatype"], tuple(int(dim) for dim in one.get("shape", [])), one["name"] in optional)
            for one in tensors
        }

    policy = config.get("model_transaction_policy", {})
    return Signature(given(metadata.get("inputs", [])), given(metadata.get("outputs", [])), bool(policy.get("decoupled")))


def check(profile: str, model: str, found: Signature, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
    """Check that a model is what a profile speaks to.

    Raises:
        ConfigError: Naming the first thing that differs.
    """
    for difference in _differences(found, inputs, outputs):
        message = f"`options.profile`: the model {model!r} is not one for {profile!r}: {difference}"
        raise ConfigError(message)


def _differences(found: Signature, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Iterator[str]:
    for kind, wanted, given in (("input", inputs, found.inputs), ("output", outputs, found.outputs)):
        for name, tensor in wanted.items():
            other = given.get(name)
            if other is None:
                if not tensor.is_optional:
                    yield f"it has no {kind} `{name}`, only {', '.join(sorted(given)) or 'none'}"
            elif other.datatype != tensor.datatype or not _fits(tensor.dims, other.shape):
                expected = f"{tensor.datatype} {list(tensor.dims)}"
                yield f"its {kind} `{name}` is {other.datatype} {list(other.shape)}: expected {expected}"
    for name, other in found.inputs.items():
        if name not in inputs and not other.is_optional:
            yield f"it wants an input `{name}`, which this profile does not give"
    if not found.is_decoupled:
        yield "it is not decoupled, so it cannot answer token by token"


def shape_of(count: int, dims: tuple[int, ...], given: tuple[int, ...]) -> list[int]:
    """Give the shape under which so many values are sent: the profile's, behind a batch of one where the model has one."""
    shape = [count if dim == ANY else dim for dim in dims]
    return [1] * (len(given) - len(shape)) + shape


def _fits(dims: tuple[int, ...], given: tuple[int, ...]) -> bool:
    """Whether the last dims are the profile's, and what comes before can be one."""
    extra = len(given) - len(dims)
    if extra not in {0, 1} or any(dim not in {ANY, 1} for dim in given[:extra]):
        return False
    return all(ANY in {mine, theirs} or mine == theirs for mine, theirs in zip(dims, given[extra:], strict=True))
