import { type ReactNode, useEffect, useRef } from 'react'
import { useVirtualizer } from '@tanstack/react-virtual'
import { jiffyLine } from '../lib/command-text'
import type { Command } from '../lib/commands'
import { visible } from '../lib/visible'
import { AsCommand } from './as-command'
import { Copy } from './controls'

/** Height of a line that is not wrapped, in pixels. */
const LINE = 19

/**
 * Lines of a log, of which only the visible ones are in the document. Long lines are wrapped. While
 * the log is followed, the last line remains visible.
 */
export function LogLines<T>({
  lines,
  label,
  isFollowed,
  onLeave,
  classOf,
  draw,
  className = '',
}: {
  lines: T[]
  label: string
  isFollowed: boolean
  /** Called when the user scrolls up. */
  onLeave: () => void
  classOf?: (line: T) => string | undefined
  draw: (line: T) => ReactNode
  className?: string
}) {
  const scroller = useRef<HTMLDivElement>(null)
  const virtual = useVirtualizer({
    count: lines.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => LINE,
    overscan: 30,
  })
  const height = virtual.getTotalSize()
  const last = lines.at(-1)
  useEffect(() => {
    const box = scroller.current
    // The height changes again when wrapped lines have been measured.
    if (isFollowed && box) box.scrollTop = box.scrollHeight
  }, [isFollowed, last, height])
  return (
    <div
      className={`log ${className}`}
      ref={scroller}
      tabIndex={0}
      role="log"
      aria-label={label}
      aria-live="off"
      onKeyDown={(e) => {
        if (['ArrowUp', 'PageUp', 'Home'].includes(e.key)) onLeave()
        // The browser's own jump to the first line can be undone: the list moves its position when
        // it measures wrapped lines.
        if (e.key === 'Home') {
          e.preventDefault()
          virtual.scrollToIndex(0)
        }
      }}
      onWheel={(e) => {
        if (e.deltaY < 0) onLeave()
      }}>
      <div style={{ height, position: 'relative' }}>
        {virtual.getVirtualItems().map((item) => {
          const line = lines[item.index]
          return (
            line !== undefined && (
              <div
                key={item.key}
                data-index={item.index}
                ref={virtual.measureElement}
                className={`log-line ${classOf?.(line) ?? ''}`}
                style={{ transform: `translateY(${item.start}px)` }}>
                {draw(line)}
              </div>
            )
          )
        })}
      </div>
    </div>
  )
}

/** The command line that shows the same as a view, and the other forms of the command. */
export function ViewCommand({ command }: { command: Command }) {
  const line = jiffyLine(command)
  return (
    <div className="view-command">
      {line && (
        <span className="row">
          <code className="truncate" title={visible(line)}>
            {visible(line)}
          </code>
          <Copy text={line} label="Copy the command" />
        </span>
      )}
      <AsCommand command={command} />
    </div>
  )
}
