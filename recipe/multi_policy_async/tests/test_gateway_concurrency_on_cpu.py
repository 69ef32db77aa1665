# Copyright 2026 the multi_policy_async authors
#
# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.
# You may obtain a copy of the License at
#
#     http://www.apache.org/licenses/LICENSE-2.0
#
# Unless required by applicable law or agreed to in writing, software
# distributed under the License is distributed on an "AS IS" BASIS,
# WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and
# limitations under the License.
"""Calls of a model in flight: a limit that holds, and one that follows the servers' load (gateway/concurrency.py)."""

import asyncio

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ..gateway.concurrency import AdaptiveLimit, CallSlots, look_at
from ..gateway.sglang_upstream import SglangRouterUpstream
from ..gateway.spec import ConcurrencySpec
from .config_fixtures import PLANNER, problems_of, tiny_job
from .fakes.fake_engine import FakeEngine
from .fakes.gateway_world import Texts, gateway_world
from .test_gateway_sync_on_cpu import ask, sync_weights, until

W = "e0-t0-s0-a0"


def adaptive(least: int = 4, most: int = 64) -> ConcurrencySpec:
    return ConcurrencySpec(max_in_flight=most, adaptive=True, min_in_flight=least)


class TestSlots:
    def test_a_wait_that_ends_just_when_a_slot_becomes_free_ends_as_what_it_is(self):
        """Not as an error of the list that it waited in, which would be a 500 for the client."""

        async def run():
            slots = CallSlots(1)
            await slots.acquire(first=False, timeout_s=60)
            waiting = asyncio.ensure_future(slots.acquire(first=False, timeout_s=60))
            await asyncio.sleep(0)
            waiting.cancel()
            slots.release()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            return slots.in_use, slots.waiting

        assert asyncio.run(run()) == (0, 0)

    @settings(max_examples=50, deadline=None)
    @given(
        limit=st.integers(1, 3),
        steps=st.lists(
            st.tuples(st.sampled_from(("acquire", "first", "release", "cancel", "limit")), st.integers(0, 5)),
            max_size=30,
        ),
    )
    def test_the_limit_holds_and_no_slot_is_lost(self, limit, steps):
        """Whatever comes in between: calls that end, that give up, a limit that moves."""

        async def run():
            slots = CallSlots(limit)
            calls: list[asyncio.Task] = []
            over: list[asyncio.Event] = []

            async def call(first: bool, end: asyncio.Event):
                await slots.acquire(first=first, timeout_s=60)
                try:
                    await end.wait()
                finally:
                    slots.release()

            most = limit
            for what, which in steps:
                if what in ("acquire", "first"):
                    over.append(asyncio.Event())
                    calls.append(asyncio.ensure_future(call(what == "first", over[-1])))
                elif what == "limit":
                    slots.set_limit(1 + which)
                    most = max(most, 1 + which)
                elif calls:
                    what == "release" and over[which % len(over)].set()
                    what == "cancel" and calls[which % len(calls)].cancel()
                for _ in range(which % 3):
                    await asyncio.sleep(0)
                assert slots.in_use <= most
            for end in over:
                end.set()
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
            assert (slots.in_use, slots.waiting) == (0, 0)

        asyncio.run(run())

    def test_calls_that_were_cut_go_before_those_that_have_not_begun(self):
        async def run():
            slots, order = CallSlots(1), []

            async def call(name: str, first: bool):
                await slots.acquire(first=first, timeout_s=60)
                order.append(name)
                slots.release()

            await slots.acquire(first=False, timeout_s=60)
            calls = [asyncio.ensure_future(call(name, name == "cut")) for name in ("new", "newer", "cut")]
            await asyncio.sleep(0)
            slots.release()
            await asyncio.gather(*calls)
            return order

        assert asyncio.run(run()) == ["cut", "new", "newer"]

    def test_a_wait_for_a_slot_ends(self):
        """Invariant 10."""

        async def run():
            slots = CallSlots(1)
            await slots.acquire(first=False, timeout_s=0.01)
            with pytest.raises(TimeoutError):
                await slots.acquire(first=False, timeout_s=0.01)
            return slots.in_use, slots.waiting

        assert asyncio.run(run()) == (1, 0)


class TestAdaptiveLimit:
    def test_it_grows_while_the_trainer_starves_calls_wait_here_and_the_servers_have_room(self):
        limit = AdaptiveLimit(adaptive())
        assert [limit.look(waiting=0, was_full=True, hungry=True) for _ in range(5)] == [8, 16, 32, 64, 64]

    @pytest.mark.parametrize(
        "seen",
        [
            {"was_full": False},  # the limit was not reached: more would change nothing
            {"hungry": False},  # groups wait to be trained: more calls would make them older
            {"waiting": 1},  # the servers are full
            {"waiting": None},  # the servers do not tell
        ],
    )
    def test_it_stays_where_one_of_these_is_missing(self, seen):
        assert AdaptiveLimit(adaptive()).look(**({"waiting": 0, "was_full": True, "hungry": True} | seen)) == 4

    def test_it_shrinks_when_requests_wait_in_the_servers_at_two_looks_in_a_row(self):
        limit = AdaptiveLimit(adaptive())
        looks = (0, 0, 0, 0, 3, 0, 3, 3, 0)  # one look may meet a burst
        found = [limit.look(waiting=waiting, was_full=True, hungry=True) for waiting in looks]
        assert found == [8, 16, 32, 64, 64, 64, 64, 48, 51], "after pressure it grows by a sixteenth"

    @settings(max_examples=100, deadline=None)
    @given(
        least=st.integers(1, 8),
        more=st.integers(0, 100),
        looks=st.lists(st.tuples(st.none() | st.integers(0, 3), st.booleans(), st.booleans()), max_size=60),
    )
    def test_it_stays_within_its_bounds(self, least, more, looks):
        limit = AdaptiveLimit(adaptive(least, least + more))
        for waiting, was_full, hungry in looks:
            assert least <= limit.look(waiting=waiting, was_full=was_full, hungry=hungry) <= least + more

    @pytest.mark.parametrize("room", [6, 40, 200])
    def test_it_settles_around_what_servers_can_run(self, room):
        """Servers that run ``room`` requests at once, and more calls than they can take."""
        limit = AdaptiveLimit(adaptive(4, 1000))
        found = [limit.look(waiting=max(0, limit.limit - room), was_full=True, hungry=True) for _ in range(200)]
        assert min(found[50:]) >= 0.7 * room - 1 and max(found[50:]) <= 1.1 * room + 1

    @pytest.mark.parametrize("bounds", [{"max_in_flight": None}, {"max_in_flight": 3, "min_in_flight": 4}])
    def test_it_needs_bounds(self, bounds):
        with pytest.raises(ValidationError, match="max_in_flight"):
            ConcurrencySpec(**({"max_in_flight": 9, "adaptive": True, "min_in_flight": 4} | bounds))


def counted(texts: Texts, engine_of: list) -> tuple[list[int], FakeEngine]:
    """An engine, and how many requests it had at each request's begin."""
    seen: list[int] = []
    says = texts.says("plan")

    def script(prompt):
        seen.append(len(engine_of[0].running))
        return says(prompt)

    engine_of.append(FakeEngine(script, token_s=0.002))
    return seen, engine_of[0]


def limited(folder, engine, concurrency: ConcurrencySpec, **spec):
    return gateway_world(
        folder,
        {"planner_model": engine},
        mapping={"planner": "planner_model"},
        bindings={"planner_model": {"concurrency": concurrency}},
        **spec,
    )


FIXED = ConcurrencySpec(max_in_flight=2, adaptive=False, min_in_flight=1)


class TestGateway:
    def test_no_more_calls_than_the_limit_are_at_a_models_servers(self, folder):
        seen, engine = counted(Texts(folder), [])

        async def run():
            async with limited(folder, engine, FIXED) as world:
                client = world.client((await world.open(W))["planner"])
                answers = await asyncio.gather(*(ask(client) for _ in range(7)))
                return answers, world.gateway.stats()["models"]["planner_model"]

        answers, stats = asyncio.run(run())
        assert answers == ["plan"] * 7 and max(seen) == 2
        assert (stats["limit"], stats["waiting_for_slot"]) == (2, 0)

    def test_calls_that_a_sync_cut_are_resumed_within_the_limit(self, folder):
        seen, engine = counted(Texts(folder), [])

        async def run():
            async with limited(folder, engine, FIXED) as world:
                client = world.client((await world.open(W))["planner"])
                asking = [asyncio.ensure_future(ask(client)) for _ in range(5)]
                await until(lambda: len(engine.running) == 2)
                await sync_weights(world, "planner_model", "0.2")
                return await asyncio.gather(*asking)

        assert asyncio.run(run()) == ["plan"] * 5 and max(seen) == 2

    def test_a_call_that_finds_no_slot_in_time_is_told_to_come_again(self, folder):
        """Invariant 9."""
        engine = FakeEngine(Texts(folder).says("plan"), token_s=5)

        async def run():
            one = ConcurrencySpec(max_in_flight=1, adaptive=False, min_in_flight=1)
            async with limited(folder, engine, one, slot_timeout_s=0.05) as world:
                client = world.client((await world.open(W))["planner"])
                first = asyncio.ensure_future(ask(client))
                await until(lambda: engine.running)
                with pytest.raises(openai.RateLimitError, match="1 calls in flight") as refused:
                    await ask(client)
                first.cancel()
                return refused.value.response.headers["retry-after"]

        assert asyncio.run(run()) == "2"

    def test_a_look_moves_the_limit_of_a_model_by_what_its_servers_and_its_queue_tell(self, folder):
        engine = FakeEngine(Texts(folder).says("plan"), waiting=0)

        async def run():
            async with limited(folder, engine, adaptive(4, 64)) as world:
                limits = []

                async def look(waiting: int, hungry: bool) -> None:
                    (model,) = world.gateway.models()
                    engine.waiting, model.slots.was_full = waiting, True
                    await look_at([model], {"planner_model": hungry}, world.gateway.metrics.in_flight_limit)
                    limits.append(world.gateway.stats()["models"]["planner_model"]["limit"])

                for waiting, hungry in ((0, True), (0, False), (0, True), (5, True), (5, True)):
                    await look(waiting, hungry)
                return limits, world.metric("in_flight_limit", model="planner_model")

        assert asyncio.run(run()) == ([8, 8, 16, 16, 12], 12)

    def test_the_gateway_looks_by_itself(self, folder):
        engine = FakeEngine(Texts(folder).says("plan"), waiting=0)

        async def run():
            async with limited(folder, engine, adaptive(4, 64), adapt_every_s=0.01) as world:
                (model,) = world.gateway.models()
                model.slots.was_full = True
                await until(lambda: model.slots.limit == 8)

        asyncio.run(run())

    def test_servers_of_a_model_that_binds_anew_just_then_do_not_tell(self):
        """An error would end the loop that adapts the limits of all models."""

        async def run():
            engine = FakeEngine(lambda prompt: [], waiting=3)
            url = await engine.start()
            upstream = SglangRouterUpstream(url, [url], connect_timeout_s=1, read_timeout_s=1)
            before = await upstream.waiting_requests()
            await upstream.close()
            after = await upstream.waiting_requests()
            await upstream.abort("e0-t0-s0-a0:planner:0#0")
            await engine.stop()
            return before, after

        assert asyncio.run(run()) == (3, None)

    @pytest.mark.parametrize(
        ("waiting", "route", "told"), [(3, "/v1/loads", 3), (3, "/get_load", 3), (None, "/v1/loads", None)]
    )
    def test_servers_are_asked_at_the_route_that_they_have(self, waiting, route, told):
        async def run():
            engine = FakeEngine(lambda prompt: [], waiting=waiting, load_route=route)
            url = await engine.start()
            upstream = SglangRouterUpstream(url, [url, url], connect_timeout_s=5, read_timeout_s=5)
            try:
                return await upstream.waiting_requests()
            finally:
                await upstream.close()
                await engine.stop()

        assert asyncio.run(run()) == (told and 2 * told)

    def test_a_server_that_is_gone_tells_nothing(self):
        async def run():
            upstream = SglangRouterUpstream(
                "http://127.0.0.1:9", ["http://127.0.0.1:9"], connect_timeout_s=5, read_timeout_s=5
            )
            try:
                return await upstream.waiting_requests()
            finally:
                await upstream.close()

        assert asyncio.run(run()) is None


@pytest.mark.slow
class TestConfiguration:
    KEY = f"{PLANNER}.async_training.concurrency"

    def test_it_is_set_per_model_and_off_by_default(self, tmp_path):
        models = tiny_job(tmp_path, f"{self.KEY}.max_in_flight=32", f"{self.KEY}.adaptive=true").models
        assert (models["planner_model"].concurrency.max_in_flight, models["planner_model"].concurrency.adaptive) == (
            32,
            True,
        )
        assert (models["solver_model"].concurrency.max_in_flight, models["solver_model"].concurrency.adaptive) == (
            None,
            False,
        )
        assert models["planner_model"].origin["async_training.concurrency.adaptive"].endswith("(command line)")

    def test_what_cannot_work_is_refused(self, tmp_path):
        found = problems_of(
            tmp_path,
            "gateway.upstream=verl_client",
            f"{self.KEY}.adaptive=true",
            f"{self.KEY}.max_in_flight=32",
            "multi_model.models.solver_model.async_training.concurrency.adaptive=true",
        )
        assert set(found) == {f"{self.KEY}.adaptive", "multi_model.models.solver_model.async_training.concurrency"}
