import { lazy, Suspense } from 'react'
import { useNavigate, useSearch } from '@tanstack/react-router'
import type { Schemas } from '../api/client'
import { useComparedFile, useComparison, useSandboxes, useSnapshots } from '../api/queries'
import { commands } from '../lib/commands'
import { bytes, count } from '../lib/format'
import { visible } from '../lib/visible'
import { useSession } from '../session'
import { AsCommand } from '../ui/as-command'
import { Button, Empty, Problem, Skeleton } from '../ui/controls'
import { NotPermitted } from '../ui/not-permitted'

type Difference = Schemas['FileDifference']

const SideBySide = lazy(() => import('../sandbox/code-editor').then((m) => ({ default: m.SideBySide })))

/** Differences between the files of two snapshots or sandboxes. */
export function ComparePage() {
  const session = useSession()
  const { a, b, path } = useSearch({ strict: false }) as { a?: string; b?: string; path?: string }
  if (!session.mayChange) {
    return (
      <div className="page">
        <h1>Compare</h1>
        <NotPermitted what="Contents of files are" scope="create" />
      </div>
    )
  }
  if (!a || !b) return <Empty isPage title="Select two points in a lineage to compare them" command="jiffy diff A B" />
  return <Comparison a={a} b={b} path={path} />
}

function Comparison({ a, b, path }: { a: string; b: string; path?: string }) {
  const navigate = useNavigate()
  const names = useNames()
  const result = useComparison(a, b)
  const first = result.data?.pages[0]
  const changes = result.data?.pages.flatMap((page) => page.changes) ?? []
  const select = (next?: string) => void navigate({ to: '/compare', search: { a, b, path: next } })
  const summary = first?.summary
  return (
    <div className="page fill">
      <header className="page-head wrap">
        <h1 className="truncate">
          {visible(names(a))} → {visible(names(b))}
        </h1>
        <Button small icon="back" onClick={() => void navigate({ to: '/compare', search: { a: b, b: a } })}>
          Swap
        </Button>
      </header>
      <div className={`compare${path ? ' with-file' : ''}`}>
        <div className="row wrap">
          {summary && (
            <span>
              {count(summary.added.count, 'added', 'added')} ({bytes(summary.added.bytes)}),{' '}
              {count(summary.changed.count, 'changed', 'changed')} ({bytes(summary.changed.bytes)}),{' '}
              {count(summary.removed.count, 'removed', 'removed')} ({bytes(summary.removed.bytes)})
            </span>
          )}
          {first && (
            <span className="muted">
              compared in {Math.round(first.compareMs)} ms, started in {Math.round(first.startMs)} ms
              {first.incomplete && ', incomplete: more than 100,000 changes'}
            </span>
          )}
          <AsCommand command={commands.compare(a, b)} />
        </div>
        <div className="card compare-list" tabIndex={0} role="region" aria-label="Differences">
          {result.error ? (
            <Problem error={result.error} onRetry={() => void result.refetch()} />
          ) : !first ? (
            <Skeleton rows={8} />
          ) : changes.length === 0 ? (
            <Empty title="No differences" />
          ) : (
            <List changes={changes} selected={path} onSelect={select} />
          )}
          {result.hasNextPage && (
            <Button busy={result.isFetchingNextPage} onClick={() => void result.fetchNextPage()}>
              Show more
            </Button>
          )}
        </div>
        {path && <FileContents a={a} b={b} path={path} onClose={() => select()} />}
      </div>
    </div>
  )
}

/** Returns a function for the names of sandboxes and snapshots. */
function useNames() {
  const sandboxes = useSandboxes().data
  const snapshots = useSnapshots(false).data
  return (id: string) => {
    const sandbox = sandboxes?.find((s) => s.sandboxID === id)
    if (sandbox) return `${sandbox.name ?? id.slice(0, 12)}, now`
    const snapshot = snapshots?.find((s) => s.snapshotID === id)
    return snapshot?.names[0] ?? id.slice(0, 12)
  }
}

function size(state?: Schemas['ComparedState']): string {
  if (!state) return '–'
  return state.type === 'directory' && state.size === 0 ? 'directory' : bytes(state.size)
}

function List({
  changes,
  selected,
  onSelect,
}: {
  changes: Difference[]
  selected?: string
  onSelect: (path: string) => void
}) {
  return (
    <table className="table">
      <thead>
        <tr>
          <th scope="col">Kind</th>
          <th scope="col">Path</th>
          <th scope="col">Before</th>
          <th scope="col">After</th>
        </tr>
      </thead>
      <tbody>
        {changes.map((change) => {
          const type = (change.b ?? change.a)?.type
          const isFile = type === 'file' || type === 'symlink'
          return (
            <tr key={change.pathBytes ?? change.path} data-selected={change.path === selected}>
              <td>{change.kind}</td>
              <td className="mono">
                {isFile ? (
                  <button type="button" className="link" onClick={() => onSelect(change.path)}>
                    {visible(change.path)}
                  </button>
                ) : (
                  visible(change.path)
                )}
                {!change.verified && <span className="muted"> (contents not compared)</span>}
              </td>
              <td>{size(change.a)}</td>
              <td>{size(change.b)}</td>
            </tr>
          )
        })}
      </tbody>
    </table>
  )
}

function FileContents({ a, b, path, onClose }: { a: string; b: string; path: string; onClose: () => void }) {
  const file = useComparedFile(a, b, path)
  const contents = file.data?.file
  const isBinary = contents?.a?.base64 || contents?.b?.base64
  const isCut = contents?.a?.truncated || contents?.b?.truncated
  return (
    <section className="card compare-file" aria-label="Contents">
      <div className="row card-body">
        <h2 className="truncate mono">{visible(path)}</h2>
        <Button small onClick={onClose}>
          Close
        </Button>
        {isCut && <span className="muted">Only the first MiB is shown.</span>}
      </div>
      {file.error ? (
        <Problem error={file.error} onRetry={() => void file.refetch()} />
      ) : !contents ? (
        <Skeleton rows={6} />
      ) : isBinary ? (
        <p className="card-body">
          The file is binary: {contents.a ? bytes(contents.a.size) : 'absent'} before,{' '}
          {contents.b ? bytes(contents.b.size) : 'absent'} after.
        </p>
      ) : (
        <Suspense fallback={<Skeleton rows={6} />}>
          <SideBySide name={path} before={contents.a?.content ?? ''} after={contents.b?.content ?? ''} />
        </Suspense>
      )}
    </section>
  )
}
