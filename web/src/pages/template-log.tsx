import { useMemo, useRef, useState } from 'react'
import { useNavigate } from '@tanstack/react-router'
import { useQuery } from '@tanstack/react-query'
import { useVirtualizer } from '@tanstack/react-virtual'
import { api, data, type Schemas } from '../api/client'
import type { Command } from '../lib/commands'
import { count } from '../lib/format'
import { templateCommands } from '../lib/template-commands'
import { visible } from '../lib/visible'
import { Button, Dialog, Problem, Skeleton, Time } from '../ui/controls'
import { Icon } from '../ui/icons'
import { LogLines, ViewCommand } from '../ui/log-lines'
import { nameOf, type Template } from './templates'

/** Number of lines of a response of the API. */
const PAGE = 100
/** Height of a build in the list, in pixels. */
const BUILD_ROW = 40

export function BuildBadge({ status }: { status: string }) {
  const look = status === 'ready' ? 'good' : status === 'error' ? 'bad' : 'busy'
  return <span className={`badge ${look}`}>{status}</span>
}

/** Part of a log: the lines after a position, and the state of the build. */
export interface LogPart {
  status: Schemas['BuildState']
  logs: string[]
  progress?: Schemas['BuildProgress']
  reason?: Schemas['FailureReason']
}

/** The log of a build of a template, which is followed until the build ends. */
export function BuildLog({ template, build, onClose }: { template: string; build: string; onClose: () => void }) {
  const path = { templateID: template, buildID: build }
  return (
    <LogDialog
      title="Build"
      id={`${template}/${build}`}
      command={templateCommands.log(template, build)}
      onClose={onClose}
      read={async (logsOffset, signal) =>
        data(
          await api.GET('/templates/{templateID}/builds/{buildID}/status', {
            params: { path, query: { logsOffset, limit: PAGE } as never },
            signal,
          }),
        )!
      }
      cancel={() => api.POST('/templates/{templateID}/builds/{buildID}/cancel', { params: { path } })}
    />
  )
}

/** The log of the build of a stock template, which cannot be cancelled. */
export function RecipeLog({ recipe, onClose }: { recipe: string; onClose: () => void }) {
  return (
    <LogDialog
      title={`Build of ${visible(recipe)}`}
      id={`recipe ${recipe}`}
      command={templateCommands.recipeLog(recipe)}
      onClose={onClose}
      read={async (logsOffset, signal) =>
        data(
          await api.GET('/recipes/{recipe}/build', {
            params: { path: { recipe }, query: { logsOffset, limit: PAGE } },
            signal,
          }),
        )!
      }
    />
  )
}

/** A log that is followed until its build ends. */
export function LogDialog({
  title,
  id,
  command,
  read,
  cancel,
  onClose,
}: {
  title: string
  /** Identifies the build. */
  id: string
  command: Command
  /** Reads at most [PAGE] lines. */
  read: (offset: number, signal: AbortSignal) => Promise<LogPart>
  /** Cancels the build. Absent if the build cannot be cancelled. */
  cancel?: () => Promise<unknown>
  onClose: () => void
}) {
  const [search, setSearch] = useState('')
  const [follow, setFollow] = useState(true)
  const [lines, setLines] = useState<string[]>([])
  const status = useQuery({
    queryKey: ['build', id],
    queryFn: async ({ signal }) => {
      let offset = lines.length
      for (;;) {
        const part = await read(offset, signal)
        const start = offset
        if (part.logs.length > 0) setLines((all) => (all.length <= start ? [...all, ...part.logs] : all))
        offset += part.logs.length
        if (part.logs.length < PAGE) return part
      }
    },
    refetchInterval: (query) =>
      query.state.data?.status === 'ready' || query.state.data?.status === 'error' ? false : 1000,
    retry: false,
  })
  const state = status.data?.status
  const isOver = state === 'ready' || state === 'error'
  const wanted = search.toLowerCase()
  const shown = useMemo(
    () => (wanted ? lines.filter((line) => line.toLowerCase().includes(wanted)) : lines),
    [lines, wanted],
  )
  return (
    <Dialog title={title} wide onClose={onClose}>
      <div className="row spread wrap">
        <BuildBadge status={state ?? 'waiting'} />
        {status.data?.progress && !isOver && (
          <span className="muted">
            {visible(status.data.progress.text)} {status.data.progress.percent} %
          </span>
        )}
        <span className="muted">
          {wanted ? count(shown.length, 'line matches', 'lines match') : count(lines.length, 'line')}
        </span>
        <label className="row">
          <input type="checkbox" checked={follow} onChange={(e) => setFollow(e.target.checked)} /> Follow
        </label>
        <input
          className="input"
          style={{ width: 180 }}
          type="search"
          aria-label="Search in the log"
          placeholder="Search"
          value={search}
          onChange={(e) => setSearch(e.target.value)}
        />
      </div>
      {status.error && <Problem error={status.error} onRetry={() => void status.refetch()} />}
      {status.data?.reason && (
        <div className="problem-box" role="alert">
          <strong>
            The build failed{status.data.reason.step ? ` at step ${visible(status.data.reason.step)}` : ''}
          </strong>
          <pre>{visible(status.data.reason.message)}</pre>
        </div>
      )}
      <LogLines
        lines={shown}
        label="Log of the build"
        className="wrapped build-log"
        isFollowed={follow}
        onLeave={() => setFollow(false)}
        draw={visible}
      />
      <ViewCommand command={command} />
      <div className="buttons">
        {cancel && !isOver && (
          <Button
            look="danger"
            onClick={() =>
              void cancel().then(
                () => status.refetch(),
                () => {},
              )
            }>
            Cancel the build
          </Button>
        )}
        <Button look="primary" onClick={onClose}>
          {isOver ? 'Close' : 'Continue in the background'}
        </Button>
      </div>
    </Dialog>
  )
}

interface Build {
  buildID: string
  status: string
  createdAt: string
}

export function HistoryDialog({ template, onClose }: { template: Template; onClose: () => void }) {
  const navigate = useNavigate()
  const detail = useQuery({
    queryKey: ['template', template.templateID],
    queryFn: async ({ signal }) =>
      data(
        await api.GET('/templates/{templateID}', { params: { path: { templateID: template.templateID } }, signal }),
      )!,
  })
  const builds = (detail.data as { builds?: Build[] } | undefined)?.builds
  return (
    <Dialog title={`Builds of ${visible(nameOf(template))}`} wide onClose={onClose}>
      {detail.error && <Problem error={detail.error} />}
      {detail.isLoading && <Skeleton rows={3} />}
      {builds && (
        <>
          <p className="muted">{count(builds.length, 'build')}</p>
          <BuildList
            builds={builds}
            onLog={(build) => {
              onClose()
              void navigate({ to: '/templates', search: { build: `${template.templateID}/${build.buildID}` } })
            }}
          />
        </>
      )}
    </Dialog>
  )
}

/** Builds, of which only the visible ones are in the document. */
function BuildList({ builds, onLog }: { builds: Build[]; onLog: (build: Build) => void }) {
  const scroller = useRef<HTMLDivElement>(null)
  const virtual = useVirtualizer({
    count: builds.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => BUILD_ROW,
    overscan: 8,
  })
  return (
    <div className="bulk-list" ref={scroller} tabIndex={0} role="region" aria-label="Builds">
      <ul style={{ height: virtual.getTotalSize(), position: 'relative', flex: 'none' }}>
        {virtual.getVirtualItems().map((item) => {
          const build = builds[item.index]
          return (
            build && (
              <li
                key={build.buildID}
                className="row virtual-row"
                aria-setsize={builds.length}
                aria-posinset={item.index + 1}
                style={{ height: BUILD_ROW, transform: `translateY(${item.start}px)` }}>
                <BuildBadge status={build.status} />
                <code className="truncate">{build.buildID}</code>
                <span className="grow right muted truncate">
                  <Time at={build.createdAt} />
                </span>
                <Button small onClick={() => onLog(build)}>
                  <Icon name="file" />
                  Log
                </Button>
              </li>
            )
          )
        })}
      </ul>
    </div>
  )
}
