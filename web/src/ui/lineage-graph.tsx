import { memo, startTransition, useEffect, useMemo, useRef, useState } from 'react'
import type { Lane, Point, Tree } from '../lib/lineage'
import { bytes, localTime } from '../lib/format'
import { visible } from '../lib/visible'
import { Button } from './controls'

const LANE = 168
const STEP = 54
const TOP = 74
const LEFT = 30
/** Distance around the visible part within which points are drawn, and by which the part changes. */
const MARGIN = 400

/** A selected point, or the present of a sandbox. */
export type Selected = { point: Point } | { lane: Lane }

interface Placed {
  key: string
  x: number
  y: number
  selected: Selected
  label: string
  detail: string
}

/** Line or arrow, and the rectangle that contains it. */
interface Edge {
  key: string
  path: string
  kind: 'line' | 'branch' | 'rollback'
  box: Box
}

interface Box {
  left: number
  top: number
  right: number
  bottom: number
}

const meets = (a: Box, b: Box) => a.left <= b.right && b.left <= a.right && a.top <= b.bottom && b.top <= a.bottom

const boxOf = (x1: number, y1: number, x2: number, y2: number): Box => ({
  left: Math.min(x1, x2),
  top: Math.min(y1, y2),
  right: Math.max(x1, x2),
  bottom: Math.max(y1, y2),
})

/** Places points by time: later points are lower, and no two are at the same height in a lane. */
function place(lanes: Lane[], tree: Tree) {
  const all = lanes.flatMap((lane) => [...lane.points, ...lane.rollbacks].map((one) => one.at))
  const times = [...new Set(all)].sort((a, b) => a - b)
  const height = new Map(times.map((at, index) => [at, TOP + index * STEP]))
  const bottom = TOP + Math.max(1, times.length) * STEP
  const xs = new Map(lanes.map((lane, index) => [lane.sandbox, LEFT + index * LANE]))
  const placed: Placed[] = []
  const edges: Edge[] = []
  for (const lane of lanes) {
    const x = xs.get(lane.sandbox) ?? 0
    let previous: number | undefined
    const from = lane.from ? tree.points.get(lane.from) : undefined
    if (from) {
      const fx = xs.get(from.lane)
      const fy = height.get(from.at)
      const first = lane.points[0] ? (height.get(lane.points[0].at) ?? bottom) : bottom
      if (fx !== undefined && fy !== undefined) {
        const target = Math.max(fy + STEP * 0.7, Math.min(first, fy + STEP))
        edges.push({
          key: `from ${lane.sandbox}`,
          kind: 'branch',
          path: `M${fx} ${fy} C${fx} ${fy + STEP * 0.6} ${x} ${fy + STEP * 0.2} ${x} ${target}`,
          box: boxOf(fx, fy, x, target),
        })
        previous = target
      }
    }
    for (const point of lane.points) {
      const y = height.get(point.at) ?? TOP
      if (previous !== undefined) {
        const box = boxOf(x, previous, x, y)
        edges.push({ key: `to ${point.id}`, kind: 'line', path: `M${x} ${previous} V${y}`, box })
      }
      previous = y
      placed.push({
        key: point.id,
        x,
        y,
        selected: { point },
        label: point.name || purposeName(point.purpose),
        detail: `${point.at ? localTime(point.at) : 'unknown time'}, ${bytes(point.bytes)}`,
      })
    }
    for (const rollback of lane.rollbacks) {
      const target = tree.points.get(rollback.to)
      const ty = target && height.get(target.at)
      const y = height.get(rollback.at)
      const tx = target && xs.get(target.lane)
      if (tx === undefined || ty === undefined || y === undefined) continue
      // The arrow leaves the lane to the left and ends at the left of the point.
      const side = Math.min(x, tx) - 18
      edges.push({
        key: `back ${lane.sandbox} ${rollback.at}`,
        kind: 'rollback',
        path: `M${x} ${y} C${side} ${y} ${side} ${ty} ${tx - 9} ${ty}`,
        box: boxOf(side, y, Math.max(x, tx), ty),
      })
    }
    if (lane.state) {
      const start = previous ?? bottom - STEP * 0.6
      edges.push({
        key: `now ${lane.sandbox}`,
        kind: 'line',
        path: `M${x} ${start} V${bottom}`,
        box: boxOf(x, start, x, bottom),
      })
      placed.push({ key: lane.sandbox, x, y: bottom, selected: { lane }, label: lane.state, detail: 'now' })
    }
  }
  return { placed, edges, width: LEFT * 2 + lanes.length * LANE, height: bottom + 44 }
}

export function purposeName(purpose: string): string {
  return (
    {
      asked: 'snapshot',
      fork: 'fork',
      pause: 'pause',
      template: 'template',
      step: 'build step',
      removed: 'removed snapshot',
    }[purpose] ?? purpose
  )
}

const keyOf = (selected: Selected | undefined) =>
  selected && ('point' in selected ? selected.point.id : selected.lane.sandbox)

/** Returns the part of the graph that is visible, enlarged by the margin. It changes in steps of the margin. */
function useVisible(scroller: React.RefObject<HTMLDivElement | null>, zoom: number): Box {
  const [visible, setVisible] = useState<Box>({ left: 0, top: 0, right: 2 * MARGIN, bottom: 2 * MARGIN })
  useEffect(() => {
    const box = scroller.current
    if (!box) return
    const measure = () => {
      const down = (pixels: number) => Math.floor(pixels / zoom / MARGIN - 1) * MARGIN
      const up = (pixels: number) => Math.ceil(pixels / zoom / MARGIN + 1) * MARGIN
      const next = {
        left: down(box.scrollLeft),
        top: down(box.scrollTop),
        right: up(box.scrollLeft + box.clientWidth),
        bottom: up(box.scrollTop + box.clientHeight),
      }
      setVisible((old) =>
        old.left === next.left && old.top === next.top && old.right === next.right && old.bottom === next.bottom
          ? old
          : next,
      )
    }
    measure()
    box.addEventListener('scroll', measure, { passive: true })
    const observer = new ResizeObserver(measure)
    observer.observe(box)
    return () => {
      box.removeEventListener('scroll', measure)
      observer.disconnect()
    }
  }, [scroller, zoom])
  return visible
}

export function LineageGraph({
  lanes,
  tree,
  selected,
  onSelect,
}: {
  lanes: Lane[]
  tree: Tree
  selected?: Selected
  onSelect: (selected: Selected) => void
}) {
  const [zoom, setZoom] = useState(1)
  const scroller = useRef<HTMLDivElement>(null)
  const drag = useRef<{ x: number; y: number; left: number; top: number }>(undefined)
  const graph = useMemo(() => place(lanes, tree), [lanes, tree])
  const current = keyOf(selected)
  const shown = useVisible(scroller, zoom)
  const isShown = (x: number, y: number) => meets(shown, boxOf(x - 12, y - 19, x + LANE, y + 19))
  // The list is drawn after the graph.
  const [hasList, setHasList] = useState(false)
  useEffect(() => startTransition(() => setHasList(true)), [])

  const move = (event: React.KeyboardEvent) => {
    const now = graph.placed.find((p) => p.key === current)
    const dx = event.key === 'ArrowLeft' ? -1 : event.key === 'ArrowRight' ? 1 : 0
    const dy = event.key === 'ArrowUp' ? -1 : event.key === 'ArrowDown' ? 1 : 0
    if (!dx && !dy) return
    event.preventDefault()
    const candidates = graph.placed.filter(
      (p) => !now || (dx ? Math.sign(p.x - now.x) === dx : p.x === now.x && Math.sign(p.y - now.y) === dy),
    )
    const nearest = candidates.sort((a, b) =>
      !now
        ? a.y - b.y
        : Math.abs(a.x - now.x) * 10 + Math.abs(a.y - now.y) - (Math.abs(b.x - now.x) * 10 + Math.abs(b.y - now.y)),
    )[0]
    if (nearest) onSelect(nearest.selected)
  }
  useEffect(() => {
    const box = scroller.current
    const point = graph.placed.find((p) => p.key === current)
    if (!box || !point) return
    const nearest = (start: number, size: number, from: number, to: number) =>
      from < start ? from : to > start + size ? to - size : start
    const [x, y] = [point.x * zoom, point.y * zoom]
    const left = nearest(box.scrollLeft, box.clientWidth, x - 24, x + LANE * zoom)
    const top = nearest(box.scrollTop, box.clientHeight, y - 30, y + 30)
    if (left !== box.scrollLeft || top !== box.scrollTop) box.scrollTo({ left, top })
  }, [current, graph, zoom])

  return (
    <div className="graph-frame">
      <div className="graph-tools">
        <Button small label="Smaller" onClick={() => setZoom(Math.max(0.4, zoom / 1.2))}>
          −
        </Button>
        <Button small label="Larger" onClick={() => setZoom(Math.min(2, zoom * 1.2))}>
          +
        </Button>
        <Button small onClick={() => setZoom(1)}>
          {Math.round(zoom * 100)} %
        </Button>
      </div>
      <div
        className="graph"
        ref={scroller}
        tabIndex={0}
        role="group"
        aria-label="Lineage. Use the arrow keys to select a point"
        onKeyDown={move}
        onPointerDown={(e) => {
          const box = scroller.current
          if (!box || (e.target as Element).closest('[data-key]')) return
          drag.current = { x: e.clientX, y: e.clientY, left: box.scrollLeft, top: box.scrollTop }
        }}
        onPointerMove={(e) => {
          const box = scroller.current
          if (!drag.current || !box) return
          box.scrollLeft = drag.current.left - (e.clientX - drag.current.x)
          box.scrollTop = drag.current.top - (e.clientY - drag.current.y)
        }}
        onPointerUp={() => {
          drag.current = undefined
        }}
        onPointerLeave={() => {
          drag.current = undefined
        }}>
        <svg
          width={graph.width * zoom}
          height={graph.height * zoom}
          viewBox={`0 0 ${graph.width} ${graph.height}`}
          aria-hidden="true">
          {lanes.map((lane, index) => {
            const x = LEFT + index * LANE
            if (x + LANE < shown.left || x > shown.right) return null
            return (
              <g key={lane.sandbox} transform={`translate(${x} 0)`}>
                <text x={-8} y={26} className="lane-name">
                  {clip(visible(lane.name ?? (lane.sandbox.slice(0, 12) || 'unknown')), 20)}
                </text>
                <text x={-8} y={43} className={`lane-state${lane.state ? '' : ' gone'}`}>
                  {laneState(lane)}
                </text>
                <line x1={0} y1={56} x2={0} y2={graph.height - 20} className="lane-line" />
              </g>
            )
          })}
          <defs>
            <marker
              id="rollback-end"
              viewBox="0 0 8 8"
              refX="7"
              refY="4"
              markerWidth="7"
              markerHeight="7"
              orient="auto">
              <path d="M0 0 L8 4 L0 8 z" className="arrow" />
            </marker>
          </defs>
          {graph.edges
            .filter((edge) => meets(edge.box, shown))
            .map((edge) => (
              <path
                key={edge.key}
                d={edge.path}
                className={`edge ${edge.kind}`}
                markerEnd={edge.kind === 'rollback' ? 'url(#rollback-end)' : undefined}
              />
            ))}
          {graph.placed
            .filter((p) => isShown(p.x, p.y))
            .map((p) => (
              <g
                key={p.key}
                data-key={p.key}
                className="point"
                data-selected={p.key === current}
                transform={`translate(${p.x} ${p.y})`}
                onClick={() => onSelect(p.selected)}>
                <rect x={-12} y={-19} width={LANE - 14} height={38} rx={7} className="hit" />
                {'lane' in p.selected ? (
                  <rect
                    x={-6}
                    y={-6}
                    width={12}
                    height={12}
                    rx={3}
                    className={`dot now ${p.selected.lane.state ?? ''}`}
                  />
                ) : (
                  <circle r={p.selected.point.count > 1 ? 8 : 6} className={`dot ${p.selected.point.purpose}`} />
                )}
                <text x={16} y={-2} className="point-name">
                  {clip(visible(p.label), 18)}
                </text>
                <text x={16} y={13} className="point-detail">
                  {'point' in p.selected ? pointDetail(p.selected.point) : p.detail}
                </text>
              </g>
            ))}
        </svg>
      </div>
      {hasList && <PointList lanes={lanes} placed={graph.placed} current={current} onSelect={onSelect} />}
    </div>
  )
}

/** The points as a list, for screen readers. */
const PointList = memo(function PointList({
  lanes,
  placed,
  current,
  onSelect,
}: {
  lanes: Lane[]
  placed: Placed[]
  current?: string
  onSelect: (selected: Selected) => void
}) {
  const points = useMemo(() => {
    const points = new Map<string, Placed[]>()
    for (const one of placed) {
      const lane = 'point' in one.selected ? one.selected.point.lane : one.selected.lane.sandbox
      const own = points.get(lane)
      if (own) own.push(one)
      else points.set(lane, [one])
    }
    return points
  }, [placed])
  return (
    <ul className="sr-only" aria-label="Points as a list">
      {lanes.map((lane) => (
        <li key={lane.sandbox}>
          {visible(lane.name ?? lane.sandbox)}: {lane.state ?? 'deleted'}
          {lane.from && `, started from ${lane.from}`}
          {lane.rollbacks.map((r) => `, rolled back to ${r.to} at ${localTime(r.at)}`).join('')}
          <ul>
            {points.get(lane.sandbox)?.map((p) => (
              <li key={p.key}>
                <button
                  type="button"
                  tabIndex={-1}
                  aria-pressed={p.key === current}
                  onClick={() => onSelect(p.selected)}>
                  {visible(p.label)}, {p.detail}
                </button>
              </li>
            ))}
          </ul>
        </li>
      ))}
    </ul>
  )
})

const laneState = ({ state, live }: Lane) => (!state ? 'deleted' : live ? `${state} · ${visible(live.alias)}` : state)

const clip = (text: string, length: number) => (text.length > length ? `${text.slice(0, length - 1)}…` : text)

const pointDetail = (point: Point) => `${point.at ? localTime(point.at).slice(-8) : '–'} · ${bytes(point.bytes)}`
