import type { Sandbox, Schemas } from '../api/client'

type Answer = Schemas['Lineage']

/** A point of the tree: a snapshot, or consecutive snapshots, which are represented by the newest. */
export interface Point {
  id: string
  name: string
  /** `removed` if the record of the snapshot does not exist. */
  purpose: string
  state: Schemas['LineageState']
  /** Time in milliseconds since 1970. 0 if it is unknown. */
  at: number
  parent?: string
  lane: string
  bytes: number
  count: number
}

/** A rollback of a sandbox to a point. */
export interface Rollback {
  at: number
  to: string
}

/** A lane of the tree: a sandbox, which may no longer exist. */
export interface Lane {
  sandbox: string
  name?: string
  /** State of the sandbox. Absent if it does not exist. */
  state?: Sandbox['state']
  /** Details of the sandbox. Absent if it does not exist, or is not in the list yet. */
  live?: Sandbox
  points: Point[]
  /** Snapshot from which the sandbox was started. */
  from?: string
  rollbacks: Rollback[]
  /** Time at which the lane begins. */
  at: number
}

export interface Tree {
  lanes: Lane[]
  points: Map<string, Point>
  truncated: boolean
}

const time = (text?: string) => (text ? Date.parse(text) : 0)

/**
 * Converts an answer of `/lineage`. `sandboxes` has the details of sandboxes that exist. The list may
 * be incomplete: states and names are also in the answer.
 */
export function lineage(answer: Answer, sandboxes: Sandbox[]): Tree {
  const live = new Map(sandboxes.map((s) => [s.sandboxID, s]))
  const lanes = new Map<string, Lane>()
  const points = new Map<string, Point>()
  for (const node of answer.nodes) {
    if (node.kind !== 'sandbox') continue
    const exists = node.state !== 'removed'
    const details = exists ? live.get(node.id) : undefined
    lanes.set(node.id, {
      sandbox: node.id,
      name: details?.name ?? node.name,
      // Only snapshots have the other states.
      state: exists ? (details?.state ?? (node.state as Sandbox['state'])) : undefined,
      live: details,
      points: [],
      rollbacks: [],
      at: time(node.createdAt),
    })
  }
  for (const node of answer.nodes) {
    if (node.kind !== 'snapshot') continue
    // The sandbox of a removed snapshot may be unknown.
    const lane = node.sandboxID ?? ''
    const point: Point = {
      id: node.id,
      name: node.count > 1 ? `${node.count} snapshots` : (node.name ?? ''),
      purpose: node.state === 'removed' ? 'removed' : (node.purpose ?? 'removed'),
      state: node.state,
      at: time(node.createdAt),
      parent: node.parentSnapshotID,
      lane,
      bytes: node.bytes ?? 0,
      count: node.count,
    }
    points.set(point.id, point)
    let found = lanes.get(lane)
    if (!found) {
      found = { sandbox: lane, points: [], rollbacks: [], at: point.at }
      lanes.set(lane, found)
    }
    found.points.push(point)
    found.at = Math.min(found.at || point.at, point.at)
  }
  for (const edge of answer.edges) {
    const lane = lanes.get(edge.from)
    if (edge.relation === 'started_from' && lane) lane.from = edge.to
    if (edge.relation === 'rolled_back_to' && lane) lane.rollbacks.push({ at: time(edge.at), to: edge.to })
  }
  for (const lane of lanes.values()) lane.points.sort((a, b) => a.at - b.at)
  const ordered = [...lanes.values()].sort((a, b) => a.at - b.at)
  return { lanes: order(ordered, points), points, truncated: answer.truncated }
}

/** Orders lanes so that a lane follows the lane from which it was started. */
function order(lanes: Lane[], points: Map<string, Point>): Lane[] {
  const children = new Map<string | undefined, Lane[]>()
  for (const lane of lanes) {
    const parent = lane.from ? points.get(lane.from)?.lane : undefined
    const siblings = children.get(parent)
    if (siblings) siblings.push(lane)
    else children.set(parent, [lane])
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
