"""`inspect-sandboxes` in evaluations of inspect, unmodified."""

from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash


async def run(tmp_path, server, sandbox):
    """Runs an evaluation with one sample, whose model is `server`."""
    task = Task(
        dataset=[Sample(input="start", target="done", files={"/srv/given.txt": "given\n"})],
        solver=[use_tools([bash(timeout=30)]), generate()],
        scorer=includes(), sandbox=sandbox,
    )
    model = get_model("openai-api/local/m", base_url=server.url, api_key="k")
    (log,) = await eval_async(task, model=model, log_dir=str(tmp_path / "logs"))
    assert log.status == "success", log.error
    return server.results


async def test_the_tools_of_an_evaluation_use_the_sandbox(model, tmp_path):
    server = model(
        [("bash", {"command": "cat /srv/given.txt; echo made >made.txt; id -un"})], [("bash", {"command": "cat made.txt; exit 3"})]
    )
    results = await run(tmp_path, server, "e2b")
    assert results[0].startswith("given\n") and "made" in results[1]


async def test_a_dockerfile_is_built_for_an_evaluation(model, tmp_path, templates):
    dockerfile = tmp_path / "Dockerfile"
    # The name of E2B's base image is a template of the host, so that the build needs no registry.
    dockerfile.write_text("FROM e2bdev/base\nRUN echo built >/built\n")
    server = model([("bash", {"command": "cat /built /srv/given.txt"})])
    (result,) = await run(tmp_path, server, ("e2b", str(dockerfile)))
    assert "built\ngiven" in result
