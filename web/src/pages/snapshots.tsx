import { useMemo, useState } from 'react'
import { Link, useNavigate, useSearch } from '@tanstack/react-router'
import { useMutation, useQuery } from '@tanstack/react-query'
import { api, data, type Snapshot } from '../api/client'
import { useRefresh, useSandboxes, useSnapshots } from '../api/queries'
import { useSession } from '../session'
import { commands } from '../lib/commands'
import { bytes, count } from '../lib/format'
import { visible } from '../lib/visible'
import { AsCommand } from '../ui/as-command'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Button, Dialog, Empty, Menu, Problem, Skeleton, Time } from '../ui/controls'
import { purposeName } from '../ui/lineage-graph'
import { notify } from '../ui/toast'
import { FilterSelect, SearchField } from '../ui/filters'

export function SnapshotsPage() {
  const search = useSearch({ strict: false }) as { q?: string; purpose?: string; sort?: string }
  const navigate = useNavigate()
  const session = useSession()
  const list = useSnapshots()
  const sandboxes = useSandboxes().data ?? []
  const [removed, setRemoved] = useState<Snapshot>()
  const [isPruning, setPruning] = useState(false)
  const update = (change: object) =>
    void navigate({ to: '/snapshots', search: { ...search, ...change }, replace: true })

  const { all, sizes, uses } = useMemo(() => {
    const all = (list.data ?? []).filter((s) => s.purpose !== 'step')
    const byId = new Map((list.data ?? []).map((s) => [s.snapshotID, s]))
    const sizes = new Map<string, number>()
    const withAncestors = (s: Snapshot): number => {
      let total = 0
      const seen = new Set<string>()
      for (
        let at: Snapshot | undefined = s;
        at && !seen.has(at.snapshotID);
        at = at.jiffy.parent ? byId.get(at.jiffy.parent) : undefined
      ) {
        seen.add(at.snapshotID)
        total += at.jiffy.bytes
      }
      return total
    }
    const uses = new Map<string, number>()
    const use = (id: string | null | undefined) => {
      if (id) uses.set(id, (uses.get(id) ?? 0) + 1)
    }
    for (const s of all) {
      sizes.set(s.snapshotID, withAncestors(s))
      use(s.jiffy.parent)
    }
    for (const s of sandboxes) use(s.snapshotID)
    return { all, sizes, uses }
  }, [list.data, sandboxes])
  const shown = useMemo(() => {
    const q = (search.q ?? '').toLowerCase()
    const found = all.filter((s) => {
      if (search.purpose && s.purpose !== search.purpose) return false
      return (
        !q ||
        s.snapshotID.startsWith(q) ||
        s.jiffy.sandbox.startsWith(q) ||
        (s.jiffy.name ?? '').toLowerCase().includes(q) ||
        s.jiffy.template.includes(q)
      )
    })
    const bySize = search.sort === 'size'
    return found.sort((a, b) => (bySize ? b.jiffy.bytes - a.jiffy.bytes : b.jiffy.created_ms - a.jiffy.created_ms))
  }, [all, search.q, search.purpose, search.sort])

  return (
    <div className="page fill">
      <header className="page-head">
        <h1>Snapshots</h1>
        {list.data && (
          <span className="muted">
            {count(shown.length, 'snapshot')}, {bytes(shown.reduce((n, s) => n + s.jiffy.bytes, 0))}
          </span>
        )}
        <div className="actions">
          {session.isAdmin && (
            <Button icon="trash" onClick={() => setPruning(true)}>
              Prune
            </Button>
          )}
        </div>
      </header>
      {list.error && !list.data && <Problem error={list.error} onRetry={() => void list.refetch()} />}
      {!list.data && !list.error && <Skeleton rows={8} height={30} />}
      {list.data && all.length === 0 && (
        <Empty title="No snapshots yet" command="jiffy snapshot ID --name before">
          <p>A snapshot has the memory, processes and files of a sandbox at one moment.</p>
        </Empty>
      )}
      {all.length > 0 && (
        <>
          <div className="filters">
            <SearchField
              label="Filter by text"
              placeholder="Name, id, sandbox or template"
              value={search.q}
              onChange={(q) => update({ q })}
            />
            <FilterSelect
              label="Purpose"
              value={search.purpose}
              options={['asked', 'fork', 'pause', 'template']}
              text={purposeName}
              onChange={(purpose) => update({ purpose })}
            />
            <select
              className="select"
              aria-label="Sort by"
              value={search.sort ?? ''}
              onChange={(e) => update({ sort: e.target.value || undefined })}>
              <option value="">Newest first</option>
              <option value="size">Largest first</option>
            </select>
          </div>
          <div className="table-wrap cards-narrow" tabIndex={0} role="region" aria-label="Snapshots">
            <table className="table">
              <thead>
                <tr>
                  <th>Name</th>
                  <th>Purpose</th>
                  <th>Sandbox</th>
                  <th>Template</th>
                  <th>Taken</th>
                  <th className="num">Size</th>
                  <th className="num">With ancestors</th>
                  <th className="num">Needed by</th>
                  <th>
                    <span className="sr-only">Actions</span>
                  </th>
                </tr>
              </thead>
              <tbody>
                {shown.slice(0, 1000).map((s) => (
                  <tr key={s.snapshotID}>
                    <td className="name">
                      <Link to="/lineage" search={{ at: s.snapshotID }}>
                        {visible(s.jiffy.name ?? s.snapshotID)}
                      </Link>
                      {s.jiffy.name && <code className="sub">{s.snapshotID.slice(0, 8)}</code>}
                    </td>
                    <td>
                      <span className={`badge plain ${s.purpose === 'asked' ? 'busy' : ''}`}>
                        {s.status === 'storing' ? 'storing' : purposeName(s.purpose)}
                      </span>
                    </td>
                    <td className="card-line">
                      <code>{s.jiffy.sandbox.slice(0, 12)}</code>
                    </td>
                    <td className="wide-only">{visible(s.jiffy.template)}</td>
                    <td className="card-line">
                      <Time at={s.jiffy.created_ms} />
                    </td>
                    <td className="num card-line">{bytes(s.jiffy.bytes)}</td>
                    <td className="num wide-only">{bytes(sizes.get(s.snapshotID))}</td>
                    <td className="num wide-only">{uses.get(s.snapshotID) ?? 0}</td>
                    <td className="actions-cell">
                      {session.mayChange && (
                        <Menu
                          label={`Actions on ${visible(s.jiffy.name ?? s.snapshotID)}`}
                          entries={[
                            {
                              label: 'Create from here',
                              icon: 'plus',
                              onSelect: () => void navigate({ to: '/new', search: { snapshot: s.snapshotID } }),
                            },
                            {
                              label: 'Show the lineage',
                              icon: 'lineage',
                              onSelect: () => void navigate({ to: '/lineage', search: { at: s.snapshotID } }),
                            },
                            'line',
                            {
                              label: 'Delete',
                              icon: 'trash',
                              danger: true,
                              disabled: s.purpose !== 'asked',
                              onSelect: () => setRemoved(s),
                            },
                          ]}
                        />
                      )}
                    </td>
                  </tr>
                ))}
              </tbody>
            </table>
            {shown.length > 1000 && (
              <p className="card-body muted">
                The first 1,000 of {shown.length.toLocaleString()} are shown. Use the filters.
              </p>
            )}
          </div>
        </>
      )}
      {removed && (
        <ConfirmDialog
          title="Delete this snapshot?"
          label="Delete"
          danger
          command={commands.removeSnapshot(removed.snapshotID)}
          onClose={() => setRemoved(undefined)}
          run={() => api.DELETE('/templates/{templateID}', { params: { path: { templateID: removed.snapshotID } } })}>
          <p>
            {visible(removed.jiffy.name ?? removed.snapshotID)}:{' '}
            {uses.has(removed.snapshotID)
              ? `the data remain on disk while needed by ${count(uses.get(removed.snapshotID) ?? 0, 'object')}.`
              : 'nothing depends on it.'}
          </p>
        </ConfirmDialog>
      )}
      {isPruning && <PruneDialog onClose={() => setPruning(false)} />}
    </div>
  )
}

/** Shows the snapshots that a prune would remove, and confirms it. */
function PruneDialog({ onClose }: { onClose: () => void }) {
  const refresh = useRefresh()
  const preview = useQuery({
    queryKey: ['prune'],
    gcTime: 0,
    retry: false,
    queryFn: async ({ signal }) => data(await api.POST('/prune', { body: { dryRun: true }, signal }))!,
  })
  const run = useMutation({ mutationFn: async () => data(await api.POST('/prune', { body: { dryRun: false } }))! })
  const items = preview.data?.items ?? []
  const error = run.error ?? preview.error
  const remove = async () => {
    const removed = await run.mutateAsync().catch(() => undefined)
    if (!removed) return
    notify(`Removed ${count(removed.items.length, 'object')}, ${bytes(removed.bytes)}`)
    refresh()
    onClose()
  }
  return (
    <Dialog
      title="Remove unused data"
      onClose={onClose}
      description="Removes data that no sandbox, snapshot or template needs.">
      {error && <Problem error={error} />}
      {preview.isLoading && <Skeleton rows={3} />}
      {preview.data && (
        <>
          <p>
            {items.length === 0
              ? 'Nothing can be removed.'
              : `${count(items.length, 'object')}, ${bytes(preview.data.bytes)}`}
          </p>
          <ul className="bulk-list" tabIndex={0} aria-label="Objects">
            {items.slice(0, 200).map((i, n) => (
              <li key={n} className="row">
                <span className="tag">{i.kind}</span>
                <span className="truncate grow">{visible(i.name ?? i.id)}</span>
                {bytes(i.bytes)}
              </li>
            ))}
          </ul>
        </>
      )}
      <AsCommand command={commands.prune()} />
      <div className="buttons">
        <Button onClick={onClose}>Cancel</Button>
        <Button look="primary danger" disabled={items.length === 0} busy={run.isPending} onClick={() => void remove()}>
          Remove
        </Button>
      </div>
    </Dialog>
  )
}
