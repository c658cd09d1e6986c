"""PostgreSQL under load, during all operations on its sandbox."""

from sandbox import Failed, Sandbox

# One statement sees one state of the database: each transaction adds the same amount to all four
# sums.
SUMS = """select (select coalesce(sum(abalance), 0) from pgbench_accounts),
    (select coalesce(sum(tbalance), 0) from pgbench_tellers), (select coalesce(sum(bbalance), 0) from pgbench_branches),
    (select coalesce(sum(delta), 0) from pgbench_history), (select count(*) from pgbench_history)"""
# Starts pgbench in the background.
LOAD = "nohup pgbench -n -c 4 -T 3600 >/tmp/pgbench.log 2>&1 </dev/null & echo $! >/tmp/pgbench.pid"


def sql(sandbox, text):
    """Executes a statement. Returns its output."""
    return sandbox.sh(f'psql -AtX -F " " -v ON_ERROR_STOP=1 -c "{text}"', user="postgres", timeout=120)


def transactions(sandbox):
    """Returns the number of transactions. Fails if the sums differ."""
    *sums, count = (int(word) for word in sql(sandbox, SUMS).split())
    if len(set(sums)) != 1:
        raise Failed(f"accounts, tellers, branches and history have different sums: {sums} after {count} transactions")
    return count


def check_progress(sandbox):
    """Checks that transactions continue and that the sums are equal. Returns the number at the start."""
    before = transactions(sandbox)
    for _ in range(100):
        sandbox.sh("sleep 0.3")
        if transactions(sandbox) > before:
            return before
    raise Failed(f"no transactions after {before}: {sandbox.sh('tail -5 /tmp/pgbench.log')}")


def check_recovery(sandbox):
    """Kills the server. Checks that it has every acknowledged transaction afterwards, and that all
    pages are intact."""
    sandbox.sh("kill $(cat /tmp/pgbench.pid)")
    before = transactions(sandbox)
    sandbox.sh("kill -9 $(head -1 /var/lib/postgresql/15/main/postmaster.pid); "
               "while pgrep -u postgres -x postgres >/dev/null; do sleep 0.1; done; "
               "rm -f /var/lib/postgresql/15/main/postmaster.pid; pg_ctlcluster 15 main start")
    after = transactions(sandbox)
    if after < before:
        raise Failed(f"{before} transactions were acknowledged before the crash, {after} exist after it")
    sandbox.sh("/usr/lib/postgresql/15/bin/pg_amcheck --all --install-missing", user="postgres", timeout=120)
    sandbox.sh("pg_ctlcluster 15 main stop && /usr/lib/postgresql/15/bin/pg_checksums --check -D /var/lib/postgresql/15/main",
               user="postgres", timeout=120)


def consistent(engine):
    """PostgreSQL stays consistent through snapshot, fork, rollback, pause and resume under pgbench."""
    sandbox = Sandbox.create(memory="1GiB")
    sandbox.sh("pg_ctlcluster 15 main start")
    sandbox.sh(f"set -e; pgbench -i -q -s 1; {LOAD}", user="postgres")
    check_progress(sandbox)
    snapshot = sandbox.snapshot()
    taken = check_progress(sandbox)
    children = sandbox.fork(2)
    for child in children:
        check_progress(child)
        check_recovery(child)
        child.check_kernel()
        child.remove()
    later = check_progress(sandbox)
    sandbox.pause()
    sandbox.resume()
    if check_progress(sandbox) < later:
        raise Failed("the pause lost transactions")
    sandbox.rollback(snapshot)
    if transactions(sandbox) > taken + 5000:
        raise Failed("the rollback did not remove later transactions")
    check_progress(sandbox)
    check_recovery(sandbox)
    sandbox.check_kernel()
