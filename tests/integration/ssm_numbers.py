"""What the SSM engine computes: logits beside transformers', draws, and checkpoints that are refused.

Run inside the engine's environment by `ssm_checks.py`.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from conformance.engine_runs import same
from safetensors.torch import load_file, save_file

from engine_consumers.ssm import checkpoints
from engine_consumers.ssm.loading import load
from engine_consumers.ssm.model import Model
from engine_consumers.ssm.options import SsmOptions
from engine_consumers.stepping.sampling import Drawing, draw
from schemas.errors import ConfigError
from schemas.messages import Sampling

KINDS = ("mamba", "mamba2", "mamba2-groups")
TOLERANCE = 1e-4  # of logits that are tens, in float32
PIECES = (1, 64, 100, 256)
READ = 270  # of the reference's tokens are read, in pieces; the others come one by one
LOST = 200  # what a lost state would be of: pieces of 100 end there
OPTIONS = SsmOptions(device="cpu", dtype="float32")


def model_of(folder: Path, slots: int = 3) -> Model:
    lm, _ = checkpoints.load(folder, "cpu", torch.float32)
    return Model(lm, slots, 2)


def in_own_format(folder: Path, target: Path) -> Path:
    """The same model as mamba_ssm writes it, its vocabulary padded with what would win every draw."""
    if not target.exists():
        from mamba_ssm.models.config_mamba import MambaConfig  # noqa: PLC0415 - `kernels.prepare` comes first
        from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel  # noqa: PLC0415

        lm, _ = checkpoints.load(folder, "cpu", torch.float32)
        config = {**vars(lm.config), "pad_vocab_size_multiple": 8}
        config["ssm_cfg"] = {name: value for name, value in config["ssm_cfg"].items() if name != "dt_limit"}
        padded = MambaLMHeadModel(MambaConfig(**config), device="cpu", dtype=torch.float32)
        weights = lm.state_dict()
        for name in ("backbone.embedding.weight", "lm_head.weight"):
            rows = weights[name]
            more = padded.lm_head.weight.shape[0] - rows.shape[0]
            assert more > 0, "there is no padding"
            weights[name] = torch.cat([rows, 5.0 * rows[:more].sign() * rows.abs().max()])
        padded.load_state_dict(weights)
        padded.save_pretrained(target)
    return target


def read_through(model: Model, ids: list[int], piece: int, read: int) -> torch.Tensor:
    """Logits after each token from the `read`th on, the tokens before that read in pieces."""
    row = model.states.slots
    model.states.clear(row)
    for at in range(0, read, piece):
        logits = model.read(ids[at : min(at + piece, read)], row)
    model.states.move(row, 0)
    return torch.stack([logits, *(model.step([token])[0] for token in ids[read:])])


async def case_logits_are_those_of_transformers(home: Path) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for kind in KINDS:
        wanted = load_file(home / kind / "reference.safetensors")
        ids, logits = wanted["ids"].tolist(), wanted["logits"][READ - 1 :]
        for folder in (home / kind, in_own_format(home / kind, home / f"{kind}-own")):
            model = model_of(folder)
            differences = [(read_through(model, ids, piece, READ) - logits).abs().max() for piece in PIECES]
            worst = float(max(differences))
            assert worst <= TOLERANCE, f"{folder.name}: logits differ by {worst:.2g}, expected at most {TOLERANCE:g}"
            figures[folder.name] = {"difference": worst, "greatest logit": float(logits.abs().max())}
    return figures


async def case_what_was_read_long_ago_counts(home: Path) -> dict[str, Any]:
    """Else the comparison above would not see a state that is lost between pieces."""
    figures = {}
    for kind in KINDS:
        ids = load_file(home / kind / "reference.safetensors")["ids"].tolist()
        model = model_of(home / kind)
        whole, cut = (read_through(model, ids[skipped:], 256, READ - skipped)[0] for skipped in (0, LOST))
        figures[kind] = float((whole - cut).abs().max())
        assert figures[kind] > 50 * TOLERANCE, f"{kind}: the first {LOST} of {READ} tokens move the logits by {figures[kind]:.2g}"
    return figures


async def case_states_take_what_they_say(home: Path) -> None:
    for kind in KINDS:
        model = model_of(home / kind)
        states = model.states
        places = [tensor.data_ptr() for pair in states.rows(0, 1) for tensor in pair]
        held = sum(tensor.numel() * tensor.element_size() for pair in states.rows(0, 5) for tensor in pair)
        assert states.bytes == held == 5 * states.bytes_per_request, (states.bytes, held, states.bytes_per_request)
        read_through(model, [7] * 700, 256, 690)
        assert [tensor.data_ptr() for pair in states.rows(0, 1) for tensor in pair] == places, "the states moved in memory"


def drawing(number: float, **sampling: Any) -> Drawing:
    made = Drawing(Sampling(**{"temperature": 1.0, **sampling}), 1)
    made.number = lambda: number
    return made


async def case_nothing_left_out_is_drawn(home: Path) -> None:  # noqa: ARG001
    """A number next to 1 is 1 in float32: it names the last token that was kept, and none behind it."""
    logits = torch.linspace(4.0, -4.0, 300).repeat(3, 1)
    for number in (0.0, 0.5, 1 - 1e-6, 1 - 1e-12):
        for sampling, most in (({"top_k": 3}, 2), ({"top_p": 0.1}, 3), ({"min_p": 0.5}, 25), ({"top_k": 1}, 0)):
            found = draw(logits.clone(), [drawing(number, **sampling), drawing(number), drawing(number, **sampling)])
            assert found[0] == found[2], (found, "differ in company")
            assert found[0] is not None, "nothing was drawn"
            assert found[0] <= most, f"token {found[0]} was left out by {sampling}, and drawn by {number}"
            assert found[0] == most or number < 1 - 1e-4, (
                f"the last one kept by {sampling} is {most}, and {number} drew {found[0]}"
            )
    endless = torch.full((1, 4), -torch.inf)
    endless[0, 2] = 1.0
    assert draw(endless, [drawing(1 - 1e-12)]) == [2], "a token of no chance was drawn"


async def case_draws_follow_the_probabilities(home: Path) -> None:  # noqa: ARG001
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 0.5])
    count = 4000
    for temperature in (0.5, 1.0, 2.0):
        drawings = [drawing((n + 0.5) / count, temperature=temperature) for n in range(count)]
        found = torch.tensor(draw(logits.repeat(count, 1), drawings)).bincount(minlength=5) / count
        wanted = (logits / temperature).softmax(-1)
        assert torch.allclose(found, wanted, atol=1.5 / count), (temperature, found.tolist(), wanted.tolist())


@torch.inference_mode()  # as a model gives its logits: outside of it nothing may write to them
def given(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


async def case_penalties_count_what_was_said(home: Path) -> None:  # noqa: ARG001
    plain, present, frequent = (
        Drawing(Sampling(temperature=0.0, **penalty), 1)
        for penalty in ({}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.0})
    )
    said = [draw(given(*[[3.0, 2.5, 1.6, 0.0]] * 3), [plain, present, frequent]) for _ in range(4)]
    same([list(column) for column in zip(*said, strict=True)], [[0, 0, 0, 0], [0, 1, 2, 0], [0, 1, 0, 2]], "tokens")


async def case_logits_that_are_not_finite_name_no_token(home: Path) -> None:  # noqa: ARG001
    logits = torch.zeros(5, 9)
    logits[0, 3], logits[1, 4], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 5], logits[4, 6] = 1.0, -torch.inf
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0}):
        found = draw(logits.clone(), [drawing(0.5, **sampling) for _ in range(5)])
        assert found[:3] == [None] * 3, found
        assert None not in found[3:], found


def fault(home: Path, spoil: Any, options: SsmOptions = OPTIONS) -> str:
    """What the engine says of a model that was spoilt."""
    folder = home / "spoilt"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(home / "mamba2", folder)
    (folder / "reference.safetensors").unlink()
    spoil(folder)
    try:
        load(folder, options, 2)
    except ConfigError as error:
        message = str(error)
        assert "\n" not in message, f"more than a line: {message!r}"
        assert len(message) < 700, f"too long: {message!r}"
        return message
    return "nothing"


def with_weights(change: Any) -> Any:
    def spoil(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return spoil


def with_config(**changes: Any) -> Any:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


A_WEIGHT = "backbone.layers.1.mixer.in_proj.weight"
FAULTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "weights cut short": (cut_short, ("model.safetensors cannot be read", "fetch it again")),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        ("no weights in", "expected one of model.safetensors"),
    ),
    "a part that is not there": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part-1.safetensors"}}'),
        ("part-1.safetensors", "No such file", "fetch it again"),
    ),
    "a missing weight": (with_weights(lambda weights: weights.pop(A_WEIGHT)), ("do not fit its config.json", A_WEIGHT)),
    "a weight too many": (
        with_weights(lambda weights: weights.update({"backbone.layers.7.norm.weight": torch.ones(64)})),
        ("do not fit its config.json", "backbone.layers.7.norm.weight"),
    ),
    "a wrong shape": (
        with_weights(lambda weights: weights.update({A_WEIGHT: torch.ones(3, 64)})),
        ("do not fit its config.json", A_WEIGHT, "[3, 64]"),
    ),
    "weights that are no numbers": (
        with_weights(lambda weights: weights[A_WEIGHT].fill_(torch.nan)),
        ("give no finite numbers in float32",),
    ),
    "quantized weights": (
        with_weights(lambda weights: weights.update({A_WEIGHT: weights[A_WEIGHT].to(torch.int8)})),
        ("quantized", A_WEIGHT, "expected float32, bfloat16 or float16"),
    ),
    "another architecture": (with_config(model_type="llama"), ("'llama'", "expected mamba or mamba2")),
    "another activation": (with_config(hidden_act="gelu"), ("'gelu'", "expected silu")),
    "a bounded time step": (with_config(time_step_limit=[0.1, 0.2]), ("time step", "[0.1, 0.2]")),
    "a configuration without sizes": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "mamba2"}'),
        ("config.json does not describe a model", "'state_size'"),
    ),
    "sizes that do not fit": (with_config(head_dim=7), ("config.json does not describe a model",)),
    "a size that is no number": (with_config(hidden_size="wide"), ("config.json does not describe a model",)),
    "a configuration that is no JSON": (
        lambda folder: (folder / "config.json").write_text("{"),
        ("config.json cannot be read",),
    ),
    "no tokenizer": (without_tokenizer, ("the tokenizer in", "`options.tokenizer`")),
}


async def case_faulty_checkpoints_are_one_clear_line(home: Path) -> dict[str, str]:
    said, wrong = {}, []
    for name, (spoil, wanted) in FAULTS.items():
        said[name] = fault(home, spoil)
        if lacking := [words for words in (*wanted, "spoilt") if words not in said[name]]:
            wrong.append(f"{name}: {lacking} not in {said[name]!r}")
    assert not wrong, "\n".join(wrong)
    missing = str(home / "nowhere")
    message = fault(home, without_tokenizer, SsmOptions(device="cpu", tokenizer=missing))
    assert "`options.tokenizer`" in message, message
    assert missing in message, message
    return said
