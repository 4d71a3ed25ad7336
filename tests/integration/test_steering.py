"""Steering a running stack: a tenant and an engine are paused and resumed, and requests tell why they wait."""

import json
import os

import pytest
import raw

from deploy.local import ready

LIMIT_S = 60.0
COUNT = 40


@pytest.fixture
def stack(sim_stack):
    """The stack, as it was configured again afterwards."""
    yield sim_stack
    for what, name in (("tenants", "held"), ("tenants", "free"), ("engines", "sim")):
        sim_stack.forebay(what, "reset", name)


def told(stack, *arguments, check=True):
    return json.loads(stack.forebay(*arguments, "--json", check=check).stdout)


def where(stack, name):
    """What `forebay status` says of a request's one place, or nothing where it is not found."""
    found = told(stack, "status", name, check=False)["found"]
    return found[0] if found else {}


def until(stack, name, **wanted):
    """Wait until `forebay status` says so of a request."""

    def is_so():
        found = where(stack, name)
        return all(found.get(field) == value for field, value in wanted.items())

    ready.until(is_so, LIMIT_S, f"{name} to be {wanted}")


def send(stack, tenant, count):
    """A backlog of a tenant; gives its ids."""
    names = [f"{tenant}-{os.urandom(4).hex()}-{n}" for n in range(count)]
    requests = [{"id": name, "tenant": tenant, "prompt": "a", "max_output_tokens": 4} for name in names]
    ready.run_apart(raw.produce(stack.kafka, "forebay.requests.batch", requests))
    return names


def test_a_paused_tenant_waits_and_says_so_and_others_do_not(stack):
    stack.forebay("tenants", "set", "held", "--pause")
    held, free = send(stack, "held", COUNT), send(stack, "free", 3)
    until(stack, free[-1], stage="ended", status="completed")
    until(stack, held[-1], stage="waiting", why="tenant_paused")
    places = [where(stack, name)["ahead"] for name in (held[0], held[-1])]
    assert len(set(places)) == 2
    assert all(0 <= place < COUNT for place in places)
    said = stack.forebay("status", held[0]).stdout
    assert "why: its tenant is paused (`forebay tenants set held --resume`)" in said
    stack.forebay("tenants", "set", "held", "--resume", "--weight", "3")
    stack.forebay("tenants", "set", "free", "--weight", "0.5")
    for name in (held[0], held[-1]):
        until(stack, name, stage="ended", status="completed")
    shown = told(stack, "tenants", "show")
    assert (shown["held"]["holds"]["weight"], shown["free"]["holds"]["weight"]) == (3.0, 0.5)


def test_a_paused_engine_is_sent_nothing_until_it_is_resumed(stack, tmp_path):
    stack.forebay("engines", "set", "sim", "--pause")
    (name,) = send(stack, "free", 1)
    until(stack, name, stage="waiting", why="engines_paused")
    request = json.dumps({"prompt": "a", "tenant": "free"})
    found = told_with(stack, request, "explain", "-")
    (pool,) = found["explanation"]["pools"]
    assert {worker["filters"]["unpaused"] for worker in pool["workers"]} == {"is paused"}
    stack.forebay("engines", "set", "sim", "--resume")
    until(stack, name, stage="ended", status="completed")
    path = tmp_path / "saved.json"
    assert told_with(stack, request, "explain", "-", "--save-state", str(path))["explanation"]["pool"] == "sim"
    saved = told_with(stack, request, "explain", "-", "--state", str(path))
    assert saved["explanation"]["pool"] == "sim"


def told_with(stack, text, *arguments):
    return json.loads(stack.forebay(*arguments, "--json", input=text).stdout)


def test_what_was_never_sent_is_not_found(stack):
    done = stack.forebay("status", f"never-{os.getpid()}", check=False)
    assert done.returncode == 1
    assert "was not found" in done.stderr.splitlines()[-1]
