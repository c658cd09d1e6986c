"""Resource usage of a sandbox is reported."""

from datetime import datetime, timedelta, timezone


async def test_metrics_report_size_and_use_of_the_sandbox(sdk, create, eventually):
    sandbox = await create()
    hog = await sdk.start(sandbox, "exec python3 -uc 'x = bytearray(b\"x\" * 150_000_000); print(\"taken\"); input()'", stdin=True)
    await hog.wait_for_output("taken")
    info = await sdk(sandbox.get_info)

    async def measured():
        metrics = await sdk(sandbox.get_metrics)
        return [one for one in metrics if one.mem_used > 150_000_000]

    last = (await eventually(measured, 30))[-1]
    assert last.cpu_count == info.cpu_count
    assert 0 <= last.cpu_used_pct <= 100 * last.cpu_count
    assert last.mem_used < last.mem_total <= info.memory_mb << 20
    assert 0 <= last.mem_cache <= last.mem_total
    assert 0 <= last.disk_used < last.disk_total
    assert abs(last.timestamp - datetime.now(timezone.utc)) < timedelta(seconds=30)


async def test_metrics_of_an_interval_without_samples_are_empty(sdk, create):
    sandbox = await create()
    long_ago = datetime(2020, 1, 1, tzinfo=timezone.utc)
    assert await sdk(sandbox.get_metrics, start=long_ago, end=long_ago + timedelta(hours=1)) == []
