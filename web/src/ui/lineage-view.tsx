import { useMemo, useState } from 'react'
import { Link, useNavigate } from '@tanstack/react-router'
import { api, type Sandbox } from '../api/client'
import { useSandboxes, useSnapshots } from '../api/queries'
import { useSession } from '../session'
import { commands } from '../lib/commands'
import { bytes, count, duration } from '../lib/format'
import { connected, lineage, type Point, type Tree } from '../lib/lineage'
import { visible } from '../lib/visible'
import { ForkDialog, PromoteDialog } from '../pages/sandbox'
import { ConfirmDialog } from './confirm-dialog'
import { Button, CopyId, Empty, Field, Problem, Skeleton, Time } from './controls'
import { LineageGraph, purposeName, type Selected } from './lineage-graph'
import { StateBadge } from './state-badge'

/** The tree of a sandbox, or of all sandboxes, with actions on points and lanes. */
export function LineageView({
  sandbox,
  at,
  onSelect,
}: {
  sandbox?: string
  at?: string
  onSelect: (id: string) => void
}) {
  const sandboxes = useSandboxes()
  const snapshots = useSnapshots()
  const tree = useMemo(() => lineage(sandboxes.data ?? [], snapshots.data ?? []), [sandboxes.data, snapshots.data])
  const lanes = useMemo(() => {
    if (sandbox) return connected(tree, sandbox)
    return tree.lanes.filter((lane) => lane.points.length > 0 || lane.from)
  }, [tree, sandbox])
  const error = sandboxes.error ?? snapshots.error
  if (error && (!sandboxes.data || !snapshots.data))
    return (
      <Problem
        error={error}
        onRetry={() => {
          void sandboxes.refetch()
          void snapshots.refetch()
        }}
      />
    )
  if (!sandboxes.data || !snapshots.data) return <Skeleton rows={8} />
  if (lanes.every((lane) => lane.points.length === 0)) {
    return (
      <Empty title="No snapshots yet" command={`jiffy snapshot ${sandbox ?? 'ID'} --name before`}>
        <p>
          Snapshots and forks of a sandbox form a tree. Each point can be restored: roll the sandbox back to it, or
          start new sandboxes from it.
        </p>
      </Empty>
    )
  }
  const found = at ? tree.points.get(at) : undefined
  const lane = at ? lanes.find((l) => l.sandbox === at) : undefined
  const selected: Selected | undefined = found ? { point: found } : lane ? { lane } : undefined
  return (
    <div className="lineage">
      <LineageGraph
        lanes={lanes}
        tree={tree}
        selected={selected}
        onSelect={(s) => onSelect('point' in s ? s.point.id : s.lane.sandbox)}
      />
      <aside className="card lineage-side" aria-label="Selected point">
        {!selected && (
          <div className="card-body muted">
            Select a point to roll back, fork or create from it. Time runs downward; each lane is a sandbox.
          </div>
        )}
        {selected && 'point' in selected && (
          <PointPanel
            key={selected.point.id}
            point={selected.point}
            tree={tree}
            sandboxes={sandboxes.data}
            sandbox={sandbox}
          />
        )}
        {selected && 'lane' in selected && selected.lane.live && <LanePanel sandbox={selected.lane.live} />}
      </aside>
    </div>
  )
}

function LanePanel({ sandbox }: { sandbox: Sandbox }) {
  const session = useSession()
  const [dialog, setDialog] = useState<'fork' | 'promote'>()
  const id = sandbox.sandboxID
  return (
    <div className="card-body stack">
      <div className="row">
        <h2 className="truncate">{visible(sandbox.name ?? id)}</h2>
        <StateBadge state={sandbox.state} />
      </div>
      <CopyId id={id} />
      <div className="row wrap">
        <Link className="button small" to="/sandboxes/$id" params={{ id }}>
          Open
        </Link>
        {session.mayChange && sandbox.state === 'running' && (
          <Button small icon="fork" onClick={() => setDialog('fork')}>
            Fork
          </Button>
        )}
        {session.mayChange && sandbox.forkedFrom && (
          <Button small icon="check" onClick={() => setDialog('promote')}>
            Promote
          </Button>
        )}
      </div>
      {dialog === 'fork' && <ForkDialog sandbox={sandbox} onClose={() => setDialog(undefined)} />}
      {dialog === 'promote' && <PromoteDialog id={id} onClose={() => setDialog(undefined)} />}
    </div>
  )
}

/** Returns the snapshots and sandboxes that need a snapshot. */
function dependants(point: Point, tree: Tree, sandboxes: Sandbox[]): string[] {
  const names: string[] = []
  for (const other of new Set(tree.points.values())) {
    if (other.parent === point.id) names.push(`snapshot ${other.name || other.id.slice(0, 10)}`)
  }
  for (const s of sandboxes) if (s.snapshotID === point.id) names.push(`sandbox ${s.name ?? s.sandboxID.slice(0, 10)}`)
  return names
}

/** Returns the first `max` names, and the number of the others. */
function listed(names: string[], max: number): string {
  const more = names.length > max ? ` and ${names.length - max} more` : ''
  return names.slice(0, max).map(visible).join(', ') + more
}

function PointPanel({
  point,
  tree,
  sandboxes,
  sandbox,
}: {
  point: Point
  tree: Tree
  sandboxes: Sandbox[]
  sandbox?: string
}) {
  const session = useSession()
  const navigate = useNavigate()
  const [dialog, setDialog] = useState<'rollback' | 'remove'>()
  const targets = sandboxes.filter(
    (s) => s.sandboxID === point.lane || s.sandboxID === sandbox || s.forkedFrom === point.lane,
  )
  const [target, setTarget] = useState(sandbox ?? point.lane)
  const [before, setBefore] = useState(true)
  const [snapshotID, setSnapshot] = useState(point.id)
  const rolled = targets.find((s) => s.sandboxID === target) ?? targets[0]
  const [newest] = point.snapshots
  const used = dependants(point, tree, sandboxes)
  const rollBack = async () => {
    if (!rolled) return
    const path = { sandboxID: rolled.sandboxID }
    if (before && rolled.state === 'running') {
      await api.POST('/sandboxes/{sandboxID}/snapshots', { params: { path }, body: {} })
    }
    await api.POST('/sandboxes/{sandboxID}/rollback', { params: { path }, body: { snapshotID } })
  }
  return (
    <div className="card-body stack">
      <h2>{visible(point.name || purposeName(point.purpose))}</h2>
      {point.snapshots.length > 1 ? (
        <Field id="series" label={count(point.snapshots.length, 'snapshot')}>
          <select id="series" className="select" value={snapshotID} onChange={(e) => setSnapshot(e.target.value)}>
            {point.snapshots.map((s) => (
              <option key={s.snapshotID} value={s.snapshotID}>
                {new Date(s.jiffy.created_ms).toLocaleString()}
              </option>
            ))}
          </select>
        </Field>
      ) : (
        <CopyId id={point.id} />
      )}
      <dl className="facts">
        <dt>Taken</dt>
        <dd>
          <Time at={point.at} />
        </dd>
        <dt>Purpose</dt>
        <dd>{purposeName(point.purpose)}</dd>
        <dt>Size</dt>
        <dd>{bytes(point.bytes)}</dd>
        {newest && (
          <>
            <dt>Guest stopped</dt>
            <dd>{newest.stoppedMs.toFixed(1)} ms</dd>
            <dt>Status</dt>
            <dd>{newest.status}</dd>
          </>
        )}
        <dt>Needed by</dt>
        <dd>{used.length === 0 ? 'nothing' : listed(used, 5)}</dd>
      </dl>
      {session.mayChange ? (
        <div className="row wrap">
          {rolled && (
            <Button icon="back" look="primary" onClick={() => setDialog('rollback')}>
              Roll back to here
            </Button>
          )}
          <Button icon="plus" onClick={() => void navigate({ to: '/new', search: { snapshot: snapshotID } })}>
            Create from here
          </Button>
          <Button icon="trash" look="danger" onClick={() => setDialog('remove')}>
            Delete
          </Button>
        </div>
      ) : (
        <p className="muted">Actions require a key of scope create or admin.</p>
      )}
      {dialog === 'rollback' && rolled && (
        <ConfirmDialog
          title={`Roll back ${visible(rolled.name ?? rolled.sandboxID)}?`}
          label="Roll back"
          danger={!before}
          command={[
            ...(before ? [commands.snapshot(rolled.sandboxID)] : []),
            commands.rollback(rolled.sandboxID, snapshotID),
          ]}
          onClose={() => setDialog(undefined)}
          run={rollBack}>
          <div className="stack">
            {targets.length > 1 && (
              <Field id="target" label="Sandbox">
                <select
                  id="target"
                  className="select"
                  value={rolled.sandboxID}
                  onChange={(e) => setTarget(e.target.value)}>
                  {targets.map((s) => (
                    <option key={s.sandboxID} value={s.sandboxID}>
                      {visible(s.name ?? s.sandboxID)}
                    </option>
                  ))}
                </select>
              </Field>
            )}
            <p>
              Memory, processes and files return to the state of <Time at={point.at} />,{' '}
              {duration((Date.now() - point.at) / 1000)} ago. All later changes of the sandbox and its open terminals
              are lost{before ? ', unless you return to the new snapshot' : ''}.
            </p>
            <label className="row">
              <input
                type="checkbox"
                checked={before}
                disabled={rolled.state !== 'running'}
                onChange={(e) => setBefore(e.target.checked)}
              />{' '}
              Take a snapshot before
            </label>
          </div>
        </ConfirmDialog>
      )}
      {dialog === 'remove' && (
        <ConfirmDialog
          title="Delete this snapshot?"
          label="Delete"
          danger
          command={commands.removeSnapshot(snapshotID)}
          onClose={() => setDialog(undefined)}
          run={() => api.DELETE('/templates/{templateID}', { params: { path: { templateID: snapshotID } } })}>
          <p>
            {used.length > 0
              ? `Its data remain on disk while ${listed(used, 10)} need them.`
              : 'Nothing depends on it.'}
          </p>
        </ConfirmDialog>
      )}
    </div>
  )
}
