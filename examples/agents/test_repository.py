"""Builds a repository once, and tests two changes of it from the same snapshot."""

from jiffy import CommandExitException, Sandbox

FILES = {
    "repository/greeting.py": "def greet(name):\n    return f'hello {name}'\n",
    "repository/test_greeting.py": (
        "import unittest\nfrom greeting import greet\n\n\n"
        "class Test(unittest.TestCase):\n    def test_greet(self):\n"
        "        self.assertEqual(greet('you'), 'hello you')\n"
    ),
}
CHANGES = {
    "rename": "sed -i s/name/person/g greeting.py",
    "shout": "sed -i 's/{name}/{name}!/' greeting.py",
}

with Sandbox.create() as sandbox:
    for path, content in FILES.items():
        sandbox.files.write(path, content)
    sandbox.commands.run(
        "git init -q && git add . && python3 -m compileall -q .", cwd="/home/user/repository"
    )
    built = sandbox.snapshot()
    try:
        for name, change in CHANGES.items():
            # Each change starts from the same state, with memory and processes.
            with Sandbox.create(built.snapshot_id) as copy:
                copy.commands.run(change, cwd="/home/user/repository")
                try:
                    copy.commands.run("python3 -m unittest -q", cwd="/home/user/repository")
                    print(f"{name}: passed")
                except CommandExitException as failure:
                    print(f"{name}: failed\n{failure.stderr.splitlines()[-1]}")
    finally:
        built.delete()
