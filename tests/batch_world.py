"""Batch runs on the whole path in memory: their files, and a run as a process of its own."""

import json

from broker.batch import Files, Plan, Settings, run_batch
from schemas import Topics

TOPICS = Topics()


def line(custom_id, prompt="say it", **body):
    body = {"model": "auto", "prompt": prompt, "max_tokens": 4, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def good(count):
    return [line(f"c{n}", f"say {n}") for n in range(count)]


def write(folder, lines):
    folder.mkdir(exist_ok=True)
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")


def plan_in(folder, **options):
    files = Files(folder / "in.jsonl", folder / "out.jsonl", folder / "err.jsonl")
    return Plan(files, Settings("t1"), 100_000, **options)


def outputs(folder):
    return [[json.loads(text) for text in (folder / name).read_text().splitlines()] for name in ("out.jsonl", "err.jsonl")]


async def go(world, folder, name="batch", limits=None, reports=None, blobs=None, **options):
    """Open the plan and bring it to its end, as a process of its own."""
    plan = plan_in(folder, **options)
    report = reports.append if reports is not None else lambda _: None
    try:
        return await run_batch(plan, world.way(name), TOPICS, limits, report=report, blobs=blobs)
    finally:
        plan.close()
