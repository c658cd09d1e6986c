"""The environment `e2b` of harbor, unmodified."""

import json
import subprocess
import sys
from pathlib import Path

from test_jiffy_harbor import task  # noqa: F401


def test_a_job_builds_the_template_and_starts_each_trial_from_its_build(task, tmp_path):  # noqa: F811
    dockerfile = task / "environment/Dockerfile"
    # The name of E2B's base image is a template of the host, so that the build needs no registry.
    dockerfile.write_text(dockerfile.read_text().replace("FROM base", "FROM e2bdev/base") + "RUN touch /setup\n")
    command = [
        Path(sys.executable).parent / "harbor", "run", "--path", task, "--agent", "oracle", "--n-attempts", "2",
        "--env", "e2b", "--jobs-dir", tmp_path / "jobs", "--job-name", "job", "--yes",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = [json.loads(path.read_text()) for path in (tmp_path / "jobs/job").glob("*/result.json")]
    assert [result["exception_info"] for result in results] == [None, None]
    assert [result["verifier_result"]["rewards"] for result in results] == [{"reward": 1.0}] * 2
