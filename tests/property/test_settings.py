"""Settings: whoever reads the control topic, from wherever it begins now, comes to what all changes ever made come to."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker.transport.settings import Settings
from schemas import parse_config
from schemas.control import EngineSettings, KeptSettings, TenantSettings, change_of, decode_control, encode_control

CONFIG = parse_config(
    {
        "engines": {"a": {"kind": "sim", "pool": "p"}, "b": {"kind": "sim"}},
        "tenants": {"x": {"tokens_per_s": 5.0, "tokens_per_s_max": 10.0}, "y": {"weight": 2.0}},
        "dispatcher": {"steered_max": 2},
    }
)

numbers = st.sampled_from([1.0, 3.0, 8.0, 20.0])
bounds = st.one_of(numbers, st.none(), st.just("none"))
tenant_changes = st.fixed_dictionaries(
    {"tenant": st.sampled_from("xyz")},
    optional={
        "weight": bounds,
        "tokens_per_s": bounds,
        "tokens_per_s_max": bounds,
        "paused": st.one_of(st.booleans(), st.none()),
        "reset": st.booleans(),
    },
).filter(lambda given: given.get("reset") or set(given) - {"tenant", "reset"})
engine_changes = st.fixed_dictionaries(
    {"engine": st.sampled_from(["a", "p", "b", "unknown"]), "paused": st.one_of(st.booleans(), st.none())},
    optional={"tokens_per_s_max": bounds, "reset": st.booleans()},
)
changes = tenant_changes.map(lambda given: change_of(TenantSettings, **given)) | engine_changes.map(
    lambda given: change_of(EngineSettings, **given)
)


class Reader:
    """Whoever reads the log, as far as it has come."""

    def __init__(self, log):
        self.settings, self.position = Settings(CONFIG), log.first
        self.settings.restart(log.first)

    def read(self, log, count=1 << 30):
        for offset in sorted(log.records):
            if offset >= self.position and count:
                self.settings.add(decode_control(log.records[offset]), offset)
                self.position = offset + 1
                count -= 1

    @property
    def holds(self):
        return self.settings.tenant_patches, self.settings.pool_patches


class Log:
    """The control topic: bytes by offset."""

    def __init__(self):
        self.records, self.first, self.end = {}, 0, 0

    def write(self, record):
        self.records[self.end] = encode_control(record)
        self.end += 1

    def trim(self, before):
        self.first = max(self.first, before)
        self.records = {offset: value for offset, value in self.records.items() if offset >= before}


class Keeping(RuleBasedStateMachine):
    """Changes, dispatchers that keep and trim at any moment and of any age, and readers that lag."""

    @initialize()
    def begin(self):
        self.log = Log()
        self.whole = Settings(CONFIG)  # what all changes come to, with nothing kept or deleted
        self.dispatchers = [Reader(self.log), Reader(self.log)]
        self.under_way = []  # records to keep that are not written yet

    @rule(change=changes)
    def write(self, change):
        self.whole.add(change, self.log.end)
        self.log.write(change)

    @rule(which=st.integers(0, 1), count=st.integers(1, 5))
    def read(self, which, count):
        dispatcher = self.dispatchers[which]
        if dispatcher.position < self.log.first:  # what it wanted next has gone
            dispatcher = self.dispatchers[which] = Reader(self.log)
            count = 1 << 30
        dispatcher.read(self.log, count)

    @rule(which=st.integers(0, 1))
    def keep_later(self, which):
        dispatcher = self.dispatchers[which]
        if dispatcher.position >= self.log.first:
            self.under_way.append(dispatcher.settings.kept(dispatcher.position))

    @rule(data=st.data())
    def arrive(self, data):
        if self.under_way:
            self.log.write(self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1))))

    @rule(which=st.integers(0, 1), data=st.data())
    def trim(self, which, data):
        dispatcher = self.dispatchers[which]
        if not self.log.first <= dispatcher.position:
            return
        before = data.draw(st.integers(self.log.first, dispatcher.position))
        if dispatcher.settings.must_be_kept(before):
            self.log.write(dispatcher.settings.kept(dispatcher.position))
        self.log.trim(before)

    @rule(which=st.integers(0, 1))
    def restart(self, which):
        self.dispatchers[which] = Reader(self.log)
        self.dispatchers[which].read(self.log)

    @invariant()
    def a_reader_that_begins_now_comes_to_the_same(self):
        reader = Reader(self.log)
        reader.read(self.log)
        assert reader.holds == (self.whole.tenant_patches, self.whole.pool_patches)

    @invariant()
    def so_does_one_that_goes_on(self):
        for dispatcher in self.dispatchers:
            if dispatcher.position == self.log.end:
                assert dispatcher.holds == (self.whole.tenant_patches, self.whole.pool_patches)


Keeping.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestKeeping = Keeping.TestCase


@given(st.lists(changes, max_size=30), st.integers(0, 30))
def test_what_holds_is_always_allowed_and_within_bounds(made, kept_at):
    found = Settings(CONFIG)
    for offset, change in enumerate(made):
        said = found.refusal(change)
        assert found.add(change, offset) == said
        if offset == kept_at:
            record = found.kept(offset + 1)
            assert decode_control(encode_control(record)) == record
            assert isinstance(record, KeptSettings)
    assert len(found.tenant_patches) <= 2
    assert len(found.pool_patches) <= 2
    for one in found.tenants().values():
        assert (one.tokens_per_s or 0) <= (one.tokens_per_s_max or 1e9)
