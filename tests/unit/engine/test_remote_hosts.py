"""Host daemons and servers: who serves a host, and that its impacts run once."""

from tests.unit.engine.hostd_world import World, reported, run


def test_daemon_carries_out_the_impact_of_its_vm() -> None:
    async def test(world: World) -> None:
        daemon = await world.daemon("host-a", reported("web-0", addresses=["10.0.0.1"]))
        event_id = await world.restart("web-0")

        impact = await daemon.take()
        assert impact["event_id"] == event_id
        assert (impact["type"], impact["cause"]) == ("Reboot", "user-restart")
        assert (impact["scope"], impact["tries"], impact["targets"]) == ("web-0", 1, [])
        assert {key: impact["vm"][key] for key in ("name", "host", "address")} == {
            "name": "web-0",
            "host": "host-a",
            "address": "10.0.0.1",
        }
        assert await daemon.finish(impact, detail="it rebooted") == 1
        (done,) = await world.history("impacted")
        assert (done.vm, done.detail) == ("web-0", "it rebooted")
        assert world.servers[0].local.asked == []

    run(test)
