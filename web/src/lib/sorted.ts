import { useMemo, useRef } from 'react'
import type { Sandbox } from '../api/client'

const text = new Intl.Collator(undefined, { numeric: true })

type Value = (sandbox: Sandbox) => string | number

/** A sorted list with the list from which it was created. */
interface Former {
  sandboxes: Sandbox[]
  sorted: Sandbox[]
  of: Value
  isDescending: boolean
}

/** Sorts sandboxes by a value. Equal values retain their order. */
function sort(sandboxes: Sandbox[], of: Value, isDescending: boolean): Sandbox[] {
  const sign = isDescending ? -1 : 1
  return sandboxes.sort((a, b) => {
    const [x, y] = [of(a), of(b)]
    if (x === y) return 0
    const order = typeof x === 'number' && typeof y === 'number' ? x - y : text.compare(String(x), String(y))
    return order * sign
  })
}

/**
 * Returns the former order with the changed sandboxes. `undefined` if another comparison of the
 * values is needed: sandboxes were added, removed or moved, or a value has changed.
 */
function replaced(former: Former, sandboxes: Sandbox[]): Sandbox[] | undefined {
  if (former.sandboxes.length !== sandboxes.length) return undefined
  const changed = new Map<Sandbox, Sandbox>()
  for (let at = 0; at < sandboxes.length; at++) {
    const [old, now] = [former.sandboxes[at]!, sandboxes[at]!]
    if (old === now) continue
    if (old.sandboxID !== now.sandboxID || former.of(old) !== former.of(now)) return undefined
    changed.set(old, now)
  }
  return former.sorted.map((sandbox) => changed.get(sandbox) ?? sandbox)
}

/** Sorts the former order again, which needs few comparisons if few sandboxes have changed. */
function sortedAgain(former: Former, sandboxes: Sandbox[]): Sandbox[] {
  const left = new Map(sandboxes.map((sandbox) => [sandbox.sandboxID, sandbox]))
  const start: Sandbox[] = []
  for (const { sandboxID } of former.sorted) {
    const sandbox = left.get(sandboxID)
    if (sandbox && left.delete(sandboxID)) start.push(sandbox)
  }
  return sort([...left.values(), ...start], former.of, former.isDescending)
}

/** Returns the sandboxes in order. A change of few sandboxes of a long list takes little time. */
export function useSorted(sandboxes: Sandbox[], of: Value, isDescending: boolean): Sandbox[] {
  const former = useRef<Former>(undefined)
  return useMemo(() => {
    const last = former.current
    const sorted =
      last?.of === of && last.isDescending === isDescending
        ? (replaced(last, sandboxes) ?? sortedAgain(last, sandboxes))
        : sort([...sandboxes], of, isDescending)
    former.current = { sandboxes, sorted, of, isDescending }
    return sorted
  }, [sandboxes, of, isDescending])
}

/** Returns the same list as before if its elements are equal. */
export function useStable(ids: string[]): string[] {
  const former = useRef(ids)
  const last = former.current
  if (last !== ids && (last.length !== ids.length || ids.some((id, at) => id !== last[at]))) former.current = ids
  return former.current
}
