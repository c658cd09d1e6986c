import { useMemo, useState } from 'react'
import { Link, useNavigate } from '@tanstack/react-router'
import { api, type Sandbox } from '../api/client'
import { type LineageOf, useLineage, useSandbox, useSandboxes } from '../api/queries'
import { useSession } from '../session'
import { commands } from '../lib/commands'
import { bytes, count, duration } from '../lib/format'
import { type Lane, lineage, type Point, type Tree } from '../lib/lineage'
import { stateReason } from '../lib/state-reason'
import { visible } from '../lib/visible'
import { ForkDialog, PromoteDialog } from '../pages/sandbox'
import { ConfirmDialog } from './confirm-dialog'
import { Button, CopyId, Empty, Field, Problem, Skeleton, Time } from './controls'
import { LineageGraph, purposeName, type Selected } from './lineage-graph'
import { StateBadge } from './state-badge'

/** Maximum number of unfolded series, as in the API. */
const MAX_UNFOLDED = 100

/** The tree of a sandbox or snapshot, with actions on points and lanes. */
export function LineageView({
  of,
  sandbox,
  at,
  onSelect,
}: {
  of: LineageOf
  /** Sandbox whose page shows the tree. */
  sandbox?: string
  at?: string
  /** Receives a point or sandbox, and the sandbox of its lane. */
  onSelect: (id: string, lane: string) => void
}) {
  // The graph does not wait for this list, which may be long.
  const sandboxes = useSandboxes()
  const [unfolded, setUnfolded] = useState<string[]>([])
  const answer = useLineage(of, unfolded)
  const tree = useMemo(() => answer.data && lineage(answer.data, sandboxes.data ?? []), [answer.data, sandboxes.data])
  if (answer.error && !answer.data) return <Problem error={answer.error} onRetry={() => void answer.refetch()} />
  if (!tree) return <Skeleton rows={8} />
  const { lanes } = tree
  if (tree.points.size === 0) {
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
        onSelect={(s) =>
          'point' in s ? onSelect(s.point.id, s.point.lane) : onSelect(s.lane.sandbox, s.lane.sandbox)
        }
      />
      <aside className="card lineage-side" aria-label="Selected point">
        {!selected && (
          <div className="card-body muted">
            Select a point to roll back, fork, create from it or compare it. Time runs downward; each lane is a sandbox.
            {unfolded.length > 0 && ' Series of automatic snapshots are shown one by one.'}
            {tree.truncated && ' The tree has more than 5,000 objects: only the nearest ones are shown.'}
          </div>
        )}
        {selected && 'point' in selected && (
          <PointPanel
            key={selected.point.id}
            point={selected.point}
            tree={tree}
            isComplete={sandboxes.data !== undefined}
            sandbox={sandbox}
            // The newest series are unfolded if a user unfolds more than the API permits.
            onUnfold={(id) => setUnfolded((ids) => [...ids, id].slice(-MAX_UNFOLDED))}
          />
        )}
        {unfolded.length > 0 && (
          <div className="card-body">
            <Button small onClick={() => setUnfolded([])}>
              Fold series of snapshots
            </Button>
          </div>
        )}
        {selected && 'lane' in selected && selected.lane.state && (
          <LanePanel key={selected.lane.sandbox} lane={selected.lane} state={selected.lane.state} />
        )}
      </aside>
    </div>
  )
}

function LanePanel({ lane, state }: { lane: Lane; state: Sandbox['state'] }) {
  // A sandbox that is not in the list yet is requested.
  const requested = useSandbox(lane.sandbox, lane.live === undefined).data
  const details = lane.live ?? requested
  const forkedFrom = details?.forkedFrom
  const reason = details && stateReason(details)
  const session = useSession()
  const [dialog, setDialog] = useState<'fork' | 'promote'>()
  const id = lane.sandbox
  return (
    <div className="card-body stack">
      <div className="row">
        <h2 className="truncate">{visible(lane.name ?? id)}</h2>
        <StateBadge state={state} />
      </div>
      {reason && <p className="muted">{visible(reason)}</p>}
      <CopyId id={id} />
      <div className="row wrap">
        <Link className="button small" to="/sandboxes/$id" params={{ id }}>
          Open
        </Link>
        {session.mayChange && state === 'running' && (
          <Button small icon="fork" onClick={() => setDialog('fork')}>
            Fork
          </Button>
        )}
        {session.mayChange && forkedFrom && (
          <Button small icon="check" onClick={() => setDialog('promote')}>
            Promote
          </Button>
        )}
      </div>
      {dialog === 'fork' && (
        <ForkDialog sandbox={{ sandboxID: id, name: lane.name }} onClose={() => setDialog(undefined)} />
      )}
      {dialog === 'promote' && <PromoteDialog id={id} onClose={() => setDialog(undefined)} />}
    </div>
  )
}

/** Returns the snapshots and sandboxes that need a snapshot. */
function dependants(point: Point, tree: Tree): string[] {
  const names: string[] = []
  for (const other of tree.points.values()) {
    if (other.parent === point.id) names.push(`snapshot ${other.name || other.id.slice(0, 10)}`)
  }
  for (const lane of tree.lanes) {
    const needs = lane.state && (lane.live?.snapshotID === point.id || lane.from === point.id)
    if (needs) names.push(`sandbox ${lane.name ?? lane.sandbox.slice(0, 10)}`)
  }
  return names
}

/** Chooses another point, or a sandbox, and opens the comparison with it. */
function CompareWith({ point, tree }: { point: Point; tree: Tree }) {
  const navigate = useNavigate()
  const live = tree.lanes.filter((lane) => lane.state && lane.state !== 'broken')
  const others = [...tree.points.values()].filter((p) => p.id !== point.id && p.state === 'ready')
  const own = live.find((lane) => lane.sandbox === point.lane)
  const first = own?.sandbox ?? live[0]?.sandbox ?? others[0]?.id
  const [chosen, setChosen] = useState<string>()
  const other = chosen ?? first
  if (!other) return null
  return (
    <Field id="compare-with" label="Compare with">
      <div className="row">
        <select id="compare-with" className="select" value={other} onChange={(e) => setChosen(e.target.value)}>
          {live.map((lane) => (
            <option key={lane.sandbox} value={lane.sandbox}>
              {visible(lane.name ?? lane.sandbox.slice(0, 12))}, now
            </option>
          ))}
          {others.map((p) => (
            <option key={p.id} value={p.id}>
              {visible(p.name || purposeName(p.purpose))}, {p.id.slice(0, 8)}
            </option>
          ))}
        </select>
        <Button onClick={() => void navigate({ to: '/compare', search: { a: point.id, b: other } })}>Compare</Button>
      </div>
    </Field>
  )
}

/** Returns the first `max` names, and the number of the others. */
function listed(names: string[], max: number): string {
  const more = names.length > max ? ` and ${names.length - max} more` : ''
  return names.slice(0, max).map(visible).join(', ') + more
}

function PointPanel({
  point,
  tree,
  isComplete,
  sandbox,
  onUnfold,
}: {
  point: Point
  tree: Tree
  /** Whether the details of all sandboxes are known. */
  isComplete: boolean
  sandbox?: string
  /** Shows the snapshots of a series one by one. */
  onUnfold: (id: string) => void
}) {
  const session = useSession()
  const navigate = useNavigate()
  const [dialog, setDialog] = useState<'rollback' | 'remove'>()
  const targets = tree.lanes.filter(
    (lane) =>
      lane.state && (lane.sandbox === point.lane || lane.sandbox === sandbox || lane.live?.forkedFrom === point.lane),
  )
  const [target, setTarget] = useState(sandbox ?? point.lane)
  const [before, setBefore] = useState(true)
  const snapshotID = point.id
  const rolled = targets.find((lane) => lane.sandbox === target) ?? targets[0]
  const used = dependants(point, tree)
  const exists = point.state !== 'removed' || point.purpose !== 'removed'
  const rollBack = async () => {
    if (!rolled) return
    const path = { sandboxID: rolled.sandbox }
    if (before && rolled.state === 'running') {
      await api.POST('/sandboxes/{sandboxID}/snapshots', { params: { path }, body: {} })
    }
    await api.POST('/sandboxes/{sandboxID}/rollback', { params: { path }, body: { snapshotID } })
  }
  return (
    <div className="card-body stack">
      <h2>{visible(point.name || purposeName(point.purpose))}</h2>
      <CopyId id={point.id} />
      <dl className="facts">
        <dt>Taken</dt>
        <dd>{point.at ? <Time at={point.at} /> : 'unknown'}</dd>
        <dt>Purpose</dt>
        <dd>{purposeName(point.purpose)}</dd>
        <dt>Size</dt>
        <dd>{bytes(point.bytes)}</dd>
        <dt>Status</dt>
        <dd>{point.state}</dd>
        {point.count > 1 && (
          <>
            <dt>Snapshots</dt>
            <dd>
              {count(point.count, 'snapshot')}, of which the newest is used{' '}
              {/* Consecutive removed snapshots have no records. */}
              {exists && (
                <Button small onClick={() => onUnfold(point.id)}>
                  Unfold
                </Button>
              )}
            </dd>
          </>
        )}
        <dt>Needed by</dt>
        <dd>
          {used.length > 0 && listed(used, 5)}
          {used.length === 0 && (isComplete ? 'nothing' : 'unknown until the sandboxes are listed')}
        </dd>
      </dl>
      {!exists && <p className="muted">The snapshot was removed. Its data are part of later snapshots.</p>}
      {exists && session.mayChange && <CompareWith point={point} tree={tree} />}
      {session.mayChange ? (
        <div className="row wrap" hidden={!exists}>
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
          title={`Roll back ${visible(rolled.name ?? rolled.sandbox)}?`}
          label="Roll back"
          danger={!before}
          command={[
            ...(before ? [commands.snapshot(rolled.sandbox)] : []),
            commands.rollback(rolled.sandbox, snapshotID),
          ]}
          onClose={() => setDialog(undefined)}
          run={rollBack}>
          <div className="stack">
            {targets.length > 1 && (
              <Field id="target" label="Sandbox">
                <select
                  id="target"
                  className="select"
                  value={rolled.sandbox}
                  onChange={(e) => setTarget(e.target.value)}>
                  {targets.map((lane) => (
                    <option key={lane.sandbox} value={lane.sandbox}>
                      {visible(lane.name ?? lane.sandbox)}
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
              : isComplete
                ? 'Nothing depends on it.'
                : 'The sandboxes are not listed yet: some may need its data, which then remain on disk.'}
          </p>
        </ConfirmDialog>
      )}
    </div>
  )
}
