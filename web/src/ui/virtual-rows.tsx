import { useRef } from 'react'
import { useVirtualizer } from '@tanstack/react-virtual'

const measureElement = (element: Element) => element.getBoundingClientRect().height

/**
 * Visible rows of a table with a scrolled body. Rows have any height. Two rows without content take
 * the place of the rows before and after (`Spacer`). `getItemKey` must be another function if keys
 * have changed: all rows are then placed again, which takes time in a long table.
 */
export function useVirtualRows(count: number, estimate: number, getItemKey: (index: number) => string | number) {
  const scroller = useRef<HTMLDivElement>(null)
  const virtual = useVirtualizer({
    count,
    getScrollElement: () => scroller.current,
    estimateSize: () => estimate,
    overscan: 8,
    measureElement,
    getItemKey,
  })
  const items = virtual.getVirtualItems()
  return {
    scroller,
    items,
    measure: virtual.measureElement,
    scrollToIndex: virtual.scrollToIndex,
    before: items[0]?.start ?? 0,
    after: virtual.getTotalSize() - (items.at(-1)?.end ?? 0),
  }
}

/** Takes the place of rows that are not in the document. */
export function Spacer({ height }: { height: number }) {
  if (height <= 0) return null
  return (
    <tr className="spacer" aria-hidden="true">
      <td style={{ height, padding: 0, border: 0 }} />
    </tr>
  )
}
