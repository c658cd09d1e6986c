import type { Schemas } from '../api/client'

type Process = Schemas['GuestProcess']

/** Processor time of each process, by id and start time, at a moment in milliseconds. */
export interface Measured {
  at: number
  seconds: Map<string, number>
}

/**
 * Returns the share of one processor in percent: since the response before, or since the start of
 * the process if it is new.
 */
export function shareOf(process: Process, measured: { before?: Measured; latest?: Measured }): number {
  const { before, latest } = measured
  const seconds = before?.seconds.get(`${process.pid}.${process.startTicks}`)
  if (!before || !latest || seconds === undefined) return process.cpuPercent
  const elapsed = Math.max(0.1, (latest.at - before.at) / 1000)
  return Math.max(0, ((process.cpuSeconds - seconds) / elapsed) * 100)
}

interface Ordered {
  process: Process
  depth: number
}

/** Filters processes, and orders them as a tree, by `cpu` or by `memory`. */
export function orderProcesses(
  processes: Process[],
  query: string | undefined,
  sort: string | undefined,
  share: (process: Process) => number,
): Ordered[] {
  const wanted = query?.toLowerCase()
  const matching = wanted
    ? processes.filter(
        (p) => String(p.pid) === wanted || `${p.name} ${p.command} ${p.user}`.toLowerCase().includes(wanted),
      )
    : processes
  if (sort === 'cpu') return flat(matching, share)
  if (sort === 'memory') return flat(matching, (p) => p.memoryBytes)
  return wanted ? matching.map((process) => ({ process, depth: 0 })) : tree(matching)
}

function flat(processes: Process[], value: (process: Process) => number): Ordered[] {
  return [...processes].sort((a, b) => value(b) - value(a) || a.pid - b.pid).map((process) => ({ process, depth: 0 }))
}

/** Orders children after their parents. The sandbox determines the parents: a cycle ends the search. */
function tree(processes: Process[]): Ordered[] {
  const ids = new Set(processes.map((p) => p.pid))
  const children = new Map<number, Process[]>()
  for (const process of processes) {
    const parent = ids.has(process.parentPid) && process.parentPid !== process.pid ? process.parentPid : 0
    const list = children.get(parent)
    if (list) list.push(process)
    else children.set(parent, [process])
  }
  const ordered: Ordered[] = []
  const take = (parent: number, depth: number): Ordered[] => {
    const list = (children.get(parent) ?? []).map((process) => ({ process, depth }))
    children.delete(parent)
    return list.reverse()
  }
  for (const root of [0, ...children.keys()]) {
    const waiting = take(root, 0)
    for (let next = waiting.pop(); next; next = waiting.pop()) {
      ordered.push(next)
      waiting.push(...take(next.process.pid, next.depth + 1))
    }
  }
  return ordered
}
