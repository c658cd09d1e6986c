import { useMemo, useRef } from 'react'
import type { Sandbox } from '../api/client'

const text = new Intl.Collator(undefined, { numeric: true })

type Value = (sandbox: Sandbox) => string | number

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
 * Returns the sandboxes in order. If few of them have changed, the former order is sorted again, which
 * needs few comparisons.
 */
export function useSorted(sandboxes: Sandbox[], of: Value, isDescending: boolean): Sandbox[] {
  const former = useRef<{ ids: string[]; of: Value; isDescending: boolean }>(undefined)
  return useMemo(() => {
    const last = former.current
    let start: Sandbox[]
    if (last?.of === of && last.isDescending === isDescending) {
      const left = new Map(sandboxes.map((sandbox) => [sandbox.sandboxID, sandbox]))
      start = []
      for (const id of last.ids) {
        const sandbox = left.get(id)
        if (sandbox && left.delete(id)) start.push(sandbox)
      }
      start.unshift(...left.values())
    } else start = [...sandboxes]
    const sorted = sort(start, of, isDescending)
    former.current = { ids: sorted.map((sandbox) => sandbox.sandboxID), of, isDescending }
    return sorted
  }, [sandboxes, of, isDescending])
}
