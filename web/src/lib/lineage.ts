import type { Sandbox, Snapshot } from '../api/client'

/** A point of the tree: a snapshot, or a series of automatic snapshots. */
export interface Point {
  id: string
  snapshots: Snapshot[]
  name: string
  purpose: string
  at: number
  parent?: string
  lane: string
  bytes: number
}

/** A lane of the tree: a sandbox, which may no longer exist. */
export interface Lane {
  sandbox: string
  live?: Sandbox
  points: Point[]
  /** Snapshot from which the sandbox was started. */
  from?: string
  /** Time at which the lane begins. */
  at: number
}

export interface Tree {
  lanes: Lane[]
  points: Map<string, Point>
}

/** Minimum number of consecutive automatic snapshots that are shown as one point. */
const FOLD = 4

/**
 * Computes the tree from the lists of sandboxes and snapshots. The API has no call for the tree, so
 * the tree contains neither times of rollbacks nor ancestors that were pruned.
 */
export function lineage(sandboxes: Sandbox[], snapshots: Snapshot[]): Tree {
  const known = new Map(snapshots.map((s) => [s.snapshotID, s]))
  const live = new Map(sandboxes.map((s) => [s.sandboxID, s]))
  const lanes = new Map<string, Lane>()
  const points = new Map<string, Point>()
  const lane = (sandbox: string, at: number): Lane => {
    let found = lanes.get(sandbox)
    if (!found) {
      found = { sandbox, live: live.get(sandbox), points: [], at }
      lanes.set(sandbox, found)
    }
    found.at = Math.min(found.at, at)
    return found
  }
  const ofSandbox = snapshots.filter((s) => s.purpose !== 'template' && s.purpose !== 'step')
  for (const s of [...ofSandbox].sort((a, b) => a.jiffy.created_ms - b.jiffy.created_ms)) {
    const info = s.jiffy
    const point: Point = {
      id: s.snapshotID,
      snapshots: [s],
      name: info.name ?? '',
      purpose: s.purpose,
      at: info.created_ms,
      parent: info.parent ?? undefined,
      lane: info.sandbox,
      bytes: info.bytes,
    }
    points.set(point.id, point)
    lane(info.sandbox, info.created_ms).points.push(point)
  }
  for (const s of sandboxes) lane(s.sandboxID, s.jiffy.created_ms)
  const hasChild = new Map<string, number>()
  for (const point of points.values()) {
    if (point.parent) hasChild.set(point.parent, (hasChild.get(point.parent) ?? 0) + 1)
  }
  for (const one of lanes.values()) {
    const first = one.points[0]
    const started = one.live && (one.live.forkedFrom || known.get(one.live.snapshotID ?? '')?.purpose === 'asked')
    const from = first?.parent ?? (started ? one.live?.snapshotID : undefined)
    // Only a snapshot of another sandbox is the beginning of a lane.
    if (from && points.get(from)?.lane !== one.sandbox && points.has(from)) one.from = from
    // The API does not list the snapshot of each fork: the latest point before the fork is shown.
    const parent = one.live?.forkedFrom
    if (!one.from && parent) {
      one.from = lanes.get(parent)?.points.findLast((p) => p.at <= (one.live?.jiffy.created_ms ?? 0))?.id
    }
    one.points = fold(one.points, points, hasChild)
  }
  for (const one of lanes.values()) {
    if (one.from) one.from = points.get(one.from)?.id
  }
  const ordered = [...lanes.values()].sort((a, b) => a.at - b.at)
  return { lanes: order(ordered, points), points }
}

/** Replaces long series of automatic snapshots without other children by one point. */
function fold(list: Point[], points: Map<string, Point>, children: Map<string, number>): Point[] {
  const result: Point[] = []
  let run: Point[] = []
  const flush = () => {
    const [first] = run
    const last = run.at(-1)
    if (run.length >= FOLD && first && last) {
      const folded: Point = {
        ...last,
        parent: first.parent,
        snapshots: run.flatMap((p) => p.snapshots),
        bytes: run.reduce((n, p) => n + p.bytes, 0),
        name: `${run.length} snapshots`,
      }
      for (const point of run) points.set(point.id, folded)
      result.push(folded)
    } else {
      result.push(...run)
    }
    run = []
  }
  for (const point of list) {
    const isPlain = point.purpose === 'pause' && !point.name && (children.get(point.id) ?? 0) <= 1
    if (isPlain) run.push(point)
    else {
      flush()
      result.push(point)
    }
  }
  flush()
  return result
}

/** Orders lanes so that a lane follows the lane from which it was started. */
function order(lanes: Lane[], points: Map<string, Point>): Lane[] {
  const children = new Map<string | undefined, Lane[]>()
  for (const lane of lanes) {
    const parent = lane.from ? points.get(lane.from)?.lane : undefined
    children.set(parent, [...(children.get(parent) ?? []), lane])
  }
  const result: Lane[] = []
  const visited = new Set<string>()
  const visit = (lane: Lane) => {
    if (visited.has(lane.sandbox)) return
    visited.add(lane.sandbox)
    result.push(lane)
    for (const child of children.get(lane.sandbox) ?? []) visit(child)
  }
  for (const root of children.get(undefined) ?? []) visit(root)
  for (const lane of lanes) visit(lane)
  return result
}

/** Returns the lanes that are connected with a sandbox. */
export function connected(tree: Tree, sandbox: string): Lane[] {
  const parentOf = (lane: Lane) => (lane.from ? tree.points.get(lane.from)?.lane : undefined)
  const wanted = new Set([sandbox])
  for (let grown = true; grown;) {
    grown = false
    for (const lane of tree.lanes) {
      const parent = parentOf(lane)
      if (!parent || wanted.has(lane.sandbox) === wanted.has(parent)) continue
      wanted.add(lane.sandbox).add(parent)
      grown = true
    }
  }
  return tree.lanes.filter((lane) => wanted.has(lane.sandbox))
}
