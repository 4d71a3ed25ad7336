"""What the model behind Triton computes, beside transformers and with few of its experts resident; run by `triton_checks.py`."""

import json
import threading
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from triton_models import CONFIGS, SAID, make

from deploy.triton.experts import Experts
from deploy.triton.loading import Loaded, load
from deploy.triton.options import ModelOptions
from deploy.triton.service import Answer, Service

LIMIT_S = 60.0
PIECE = 32
ROUNDS = 12
INT8_TOLERANCE = 0.06  # of the greatest logit


class Asker:
    """Gathers what one request is answered with."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.has_first, self.is_over = threading.Event(), threading.Event()
        self.hung_up = False

    def send(self, answer: Answer, *, is_last: bool) -> None:
        self.answers.append(answer)
        self.has_first.set()
        if is_last:
            self.is_over.set()

    def has_gone(self) -> bool:
        return self.hung_up

    def all(self) -> tuple[list[int], str, str]:
        """Wait for the end; gives tokens, text and how it ended."""
        assert self.is_over.wait(LIMIT_S), "no last answer came"
        last = self.answers[-1]
        tokens = [token for one in self.answers for token in one.token_ids]
        return tokens, "".join(one.text for one in self.answers), last.finish_reason or last.error


class Serving:
    """A service over a model in this process."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.options = ModelOptions(str(folder), device="cpu", prefill_chunk=PIECE, readers=2, **options)
        self.loaded: Loaded = load(self.options)
        self.loaded = self.loaded._replace(ends=frozenset())
        self.service = Service(self.loaded, self.options)
        self.count = 0

    def __enter__(self) -> Self:
        self.service.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.service.close()

    def ask(self, body: dict[str, Any], token_ids: list[int] | None = None) -> Asker:
        asker = Asker()
        self.service.take(token_ids or [0], json.dumps(body).encode(), asker)
        return asker

    def generate(self, prompt: list[int], length: int = SAID, seed: int = 0, **sampling: Any) -> Asker:
        self.count += 1
        body = {"op": "generate", "run": f"r{self.count}", "max_output_tokens": length, "seed": seed}
        return self.ask({**body, "sampling": {"temperature": 0, **sampling}}, prompt)

    def statistics(self) -> dict[str, Any]:
        asker = self.ask({"op": "status"})
        asker.all()
        return json.loads(asker.answers[-1].statistics)


async def case_tokens_are_those_of_transformers_alone_and_in_company(home: Path) -> dict[str, Any]:
    figures = {}
    for name in CONFIGS:
        wanted = make(name, home / name)
        with Serving(home / name, slots=4) as serving:
            for prompt, said in wanted:
                assert serving.generate(prompt).all()[0] == said, f"{name}: a prompt of {len(prompt)} tokens alone"
            askers = [serving.generate(prompt) for prompt, _ in wanted]
            for asker, (prompt, said) in zip(askers, wanted, strict=True):
                assert asker.all()[0] == said, f"{name}: a prompt of {len(prompt)} tokens in company"
            figures[name] = len({token for _, said in wanted for token in said})
            assert figures[name] > 10, f"a model that always says the same tells nothing: {figures}"
    return {"different tokens": figures}


def logits_of(folder: Path, shares: dict[int, float | None], cold: str = "host") -> tuple[torch.Tensor, Experts]:
    """Logits of some requests that are read and decode together, the share of resident experts being set before some rounds."""
    loaded = load(ModelOptions(str(folder), device="cpu", dtype="float32", slots=4, readers=2, cold=cold))
    network, experts, found, last = loaded.network, loaded.network.experts, [], []
    for number in range(ROUNDS):
        if number in shares:
            share = shares[number]
            experts.set_budget(None if share is None else int(share * len(network.experts.layers) * 8) * experts.bytes_each)
        if number < 4:
            network.states.clear(4)
            for at in range(0, 60, 20):
                piece = [(7 * number + 13 * n) % 250 + 3 for n in range(at, at + 20)]
                found.append(network.read(piece, 4).unsqueeze(0))
            network.states.move(4, number)
            last.append(int(found[-1].argmax()))
        found.append(network.step(last))
        last = found[-1].argmax(-1).tolist()
    return torch.cat(found), experts


async def case_logits_are_the_same_to_the_bit_whatever_is_resident(home: Path) -> dict[str, Any]:
    figures = {}
    for name in ("mixtral", "qwen2-moe"):
        make(name, home / name)
        whole, experts = logits_of(home / name, {})
        assert experts.statistics()["misses"] == 0
        for case, shares in {"58 %": {0: 0.58}, "one": {0: 0.0}, "down and up": {0: 0.6, 3: 0.0, 6: None, 9: 0.3}}.items():
            some, experts = logits_of(home / name, shares)
            assert torch.equal(whole, some), f"{name}, {case}: the logits differ by {float((whole - some).abs().max()):.2g}"
            told = experts.statistics()
            assert told["misses"] > 0
            assert told["resident_bytes"] == told["resident"] * experts.bytes_each
            assert told["budget_bytes"] is None or told["resident"] <= max(1, told["budget_bytes"] // experts.bytes_each)
            assert 0 <= told["prefetch_used"] <= told["prefetched"]
            figures[f"{name}, {case}"] = {part: told[part] for part in ("hit_rate", "prefetched", "prefetch_used", "stall_ms")}
    return figures


async def case_eight_bits_are_near_and_do_not_depend_on_what_is_resident(home: Path) -> dict[str, Any]:
    figures = {}
    for name in ("mixtral", "qwen2-moe"):
        make(name, home / name)
        exact = load(ModelOptions(str(home / name), device="cpu", slots=1)).network.read(list(range(3, 60)), 1)
        near = load(ModelOptions(str(home / name), device="cpu", slots=1, cold="int8")).network.read(list(range(3, 60)), 1)
        off = float((exact - near).abs().max() / exact.abs().max())
        assert 0 < off <= INT8_TOLERANCE, f"{name}: logits are off by {off:.3f} of the greatest"
        whole, _ = logits_of(home / name, {}, "int8")
        some, _ = logits_of(home / name, {0: 0.4, 5: 0.0}, "int8")
        assert torch.equal(whole, some), f"{name}: the tokens depend on what is resident"
        figures[name] = round(off, 4)
    return {"off by": figures}


async def case_draws_are_the_same_alone_and_in_company(home: Path) -> dict[str, Any]:
    wanted = make("mixtral", home / "mixtral")
    hot = {"temperature": 1.2, "top_p": 0.95, "presence_penalty": 0.5}
    with Serving(home / "mixtral", slots=4) as serving:
        alone = [serving.generate(prompt, seed=n, **hot).all() for n, (prompt, _) in enumerate(wanted)]
        askers = [serving.generate(prompt, seed=n, **hot) for n, (prompt, _) in enumerate(wanted)]
        assert [asker.all() for asker in askers] == alone
        assert serving.generate(wanted[0][0], seed=99, **hot).all() != alone[0]
    return {}


async def case_who_waits_is_served_when_all_others_end_at_once(home: Path) -> dict[str, Any]:
    wanted = make("mixtral", home / "mixtral")
    with Serving(home / "mixtral", slots=1) as serving:
        askers = [serving.generate(prompt, 6) for prompt, _ in wanted]
        for asker, (_, said) in zip(askers, wanted, strict=True):
            assert asker.all()[0] == said[:6]
    return {}


async def case_ends_stops_and_refusals(home: Path) -> dict[str, Any]:
    (prompt, said), *_ = make("mixtral", home / "mixtral")
    with Serving(home / "mixtral", slots=2) as serving:
        _, text, reason = serving.generate(prompt).all()
        assert reason == "length"
        stop = next(one for one in (text[at : at + 2] for at in range(4, len(text) - 2)) if one.isascii())
        _, cut, reason = serving.generate(prompt, stop=[stop]).all()
        assert (cut, reason) == (text[: text.index(stop)], "stop")
        object.__setattr__(serving.service, "_loaded", serving.loaded._replace(ends=frozenset([said[5]])))
        tokens, _, reason = serving.generate(prompt).all()
        assert (tokens, reason) == (said[: said.index(said[5]) + 1], "stop")
        for body, token_ids, expected in (
            ({"op": "dance"}, [5], "`op`"),
            ({"op": "generate", "run": "x"}, [5], "max_output_tokens"),
            ({"op": "generate", "run": "x", "max_output_tokens": 5, "sampling": {"top_p": 7}}, [5], "top_p"),
            ({"op": "generate", "run": "x", "max_output_tokens": 5}, [9_999], "input_tokens[0]"),
            ({"op": "generate", "run": "x", "max_output_tokens": 5}, [5] * 300, "context"),
            ({"op": "budget", "bytes": -1}, [0], "bytes"),
        ):
            asker = serving.ask(body, token_ids)
            told = msgspec.json.decode(asker.all()[2])
            assert told["code"] in {"invalid_request", "context_overflow"}, told
            assert expected in told["message"], told
    return {}


async def case_who_is_cancelled_or_hangs_up_leaves_the_loop(home: Path) -> dict[str, Any]:
    (prompt, said), *_ = make("mixtral", home / "mixtral")
    with Serving(home / "mixtral", slots=2) as serving:
        first, second, waiting = (serving.generate(prompt, 200) for _ in range(3))
        assert first.has_first.wait(LIMIT_S)
        same = serving.ask({"op": "generate", "run": "r1", "max_output_tokens": 5}, prompt)
        assert "r1" in same.all()[2]
        cancel = serving.ask({"op": "cancel", "run": "r1"})
        assert cancel.all() == ([], "", "")
        assert first.is_over.is_set(), "the cancel was answered before its run had ended"
        assert first.all()[2] == "abort"
        second.hung_up = waiting.hung_up = True
        assert second.all()[2] == waiting.all()[2] == "abort"
        assert serving.ask({"op": "cancel", "run": "nobody"}).all() == ([], "", "")
        told = serving.statistics()
        assert (told["running"], told["waiting"]) == (0, 0)
        assert serving.generate(prompt).all()[0] == said
    return {}
