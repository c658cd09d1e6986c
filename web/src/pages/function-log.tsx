import { useEffect, useMemo, useState } from 'react'
import { api, data, type Schemas } from '../api/client'
import { useFilters } from '../lib/filters'
import { count } from '../lib/format'
import { functionCommands } from '../lib/function-commands'
import { visible } from '../lib/visible'
import { Copy, Empty, Problem, Skeleton } from '../ui/controls'
import { FilterSelect, SearchField } from '../ui/filters'
import { LogLines, ViewCommand } from '../ui/log-lines'

type Entry = Schemas['FunctionLogEntry']

/** Entries that are retained in the page. */
const MAX_ENTRIES = 5000
/** Time that a request waits for new entries, in seconds. */
const WAIT_S = 20

/** Reads the log, and waits for new entries. */
function useLog(name: string) {
  const [entries, setEntries] = useState<Entry[]>()
  const [error, setError] = useState<unknown>()
  const [attempt, setAttempt] = useState(0)
  useEffect(() => {
    const abort = new AbortController()
    const follow = async () => {
      let after = 0
      let wait = 0
      while (!abort.signal.aborted) {
        const query = { after, wait }
        const page = data(
          await api.GET('/functions/{name}/logs', { params: { path: { name }, query }, signal: abort.signal }),
        )!
        setEntries((old) => [...(after === 0 ? [] : (old ?? [])), ...page.entries].slice(-MAX_ENTRIES))
        setError(undefined)
        after = Number(page.next)
        wait = WAIT_S
      }
    }
    follow().catch((e: unknown) => {
      if (!abort.signal.aborted) setError(e)
    })
    return () => abort.abort()
  }, [name, attempt])
  return { entries, error, retry: () => setAttempt((n) => n + 1) }
}

/** Output and failures of a function, as they appear. */
export function FunctionLog({ name }: { name: string }) {
  const [search, update] = useFilters<{ q?: string; stream?: string }>()
  const [follow, setFollow] = useState(true)
  const { entries, error, retry } = useLog(name)
  const wanted = (search.q ?? '').toLowerCase()
  const shown = useMemo(
    () =>
      (entries ?? []).filter((e) => {
        if (search.stream && e.stream !== search.stream) return false
        return !wanted || e.text.toLowerCase().includes(wanted) || e.requestID.startsWith(wanted)
      }),
    [entries, search.stream, wanted],
  )
  if (error !== undefined && !entries) return <Problem error={error} onRetry={retry} />
  if (!entries) return <Skeleton rows={8} />
  return (
    <div className="stack grow fill-column">
      <div className="filters" role="search">
        <SearchField
          label="Search in the log"
          placeholder="Text or id of a request"
          value={search.q}
          onChange={(q) => update({ q })}
        />
        <FilterSelect
          label="Stream"
          value={search.stream}
          options={['stdout', 'stderr', 'fault']}
          onChange={(stream) => update({ stream })}
        />
        <span className="muted">{count(shown.length, 'line')}</span>
        <label className="row">
          <input type="checkbox" checked={follow} onChange={(e) => setFollow(e.target.checked)} /> Follow
        </label>
        <span className="grow" />
        <Copy text={shown.map((e) => e.text).join('\n')} label="Copy the log" small={false} />
      </div>
      {error !== undefined && <Problem error={error} onRetry={retry} />}
      {entries.length === 0 ? (
        <Empty title="The log is empty" command={`jiffy function logs ${name}`}>
          <p>Output and failures of requests appear here.</p>
        </Empty>
      ) : (
        <LogLines
          lines={shown}
          label="Log of the function"
          className="wrapped"
          isFollowed={follow}
          onLeave={() => setFollow(false)}
          classOf={(e) => (e.stream === 'stdout' ? undefined : 'error')}
          draw={(e) => (
            <>
              <time title={e.timestamp}>{e.timestamp.slice(11, 19)}</time>
              <span className="muted" title={`Request ${e.requestID}`}>
                {e.requestID.slice(0, 8)} {e.stream}
              </span>{' '}
              {visible(e.text)}
            </>
          )}
        />
      )}
      <ViewCommand command={functionCommands.logs(name)} />
    </div>
  )
}
