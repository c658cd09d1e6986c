import { useEffect, useState } from 'react'
import { Link, Outlet, useLocation, useNavigate, useParams } from '@tanstack/react-router'
import { api, isNotFound, type SandboxDetail, messageOf } from '../api/client'
import { useNow, useRefresh, useSandbox } from '../api/queries'
import { useSession } from '../session'
import { actionOf, EXTENSION_S, fork, MAX_FORK, type SandboxAction } from '../lib/actions'
import { commands } from '../lib/commands'
import { countDown, duration, remaining } from '../lib/format'
import { visible } from '../lib/visible'
import { AsCommand } from '../ui/as-command'
import { ConfirmDialog } from '../ui/confirm-dialog'
import { Button, CopyId, Dialog, Empty, Field, Menu, Problem, Skeleton } from '../ui/controls'
import { StateBadge } from '../ui/state-badge'
import { notify } from '../ui/toast'
import { TimeoutDialog } from './timeout-dialog'

const tabs = [
  ['terminal', 'Terminal'],
  ['files', 'Files'],
  ['charts', 'Charts'],
  ['processes', 'Processes'],
  ['console', 'Console log'],
  ['connections', 'Connections'],
  ['ports', 'Ports'],
  ['lineage', 'Lineage'],
  ['details', 'Details'],
] as const

export function SandboxPage() {
  const { id } = useParams({ strict: false }) as { id: string }
  const query = useSandbox(id)
  const sandbox = query.data
  const isGone = isNotFound(query.error)
  const isKilled = isGone || sandbox?.state === 'killed'
  const { mayChange } = useSession()
  const hasTerminal = useShownTerminal(id, mayChange && !isKilled && sandbox?.state === 'running')
  if (isKilled && !(sandbox && hasTerminal)) {
    return (
      <div className="page">
        <Empty isPage title={sandbox ? 'This sandbox was killed' : 'This sandbox does not exist'}>
          <p className="muted">{sandbox ? visible(sandbox.name ?? id) : <code>{visible(id)}</code>}</p>
          {query.error && <p className="muted">{visible(query.error.message)}</p>}
          <FurtherPages id={id} />
        </Empty>
      </div>
    )
  }
  if (query.error && !sandbox)
    return (
      <div className="page">
        <Problem error={query.error} onRetry={() => void query.refetch()} />
      </div>
    )
  if (!sandbox)
    return (
      <div className="page">
        <Skeleton rows={8} />
      </div>
    )
  return (
    <div className="page fill sandbox-page">
      {isKilled ? <KilledHeader sandbox={sandbox} /> : <Header sandbox={sandbox} />}
      {sandbox.jiffy.cause && (
        <div className="problem-box" role="alert">
          <strong>The guest was lost</strong>
          <pre>{visible(sandbox.jiffy.cause)}</pre>
        </div>
      )}
      {sandbox.diskFailure && (
        <div className="problem-box" role="alert">
          <strong>The host could not serve the disk</strong>
          <pre>{visible(sandbox.diskFailure)}</pre>
        </div>
      )}
      {!isKilled && (
        <nav className="tabs" aria-label="Tabs of the sandbox">
          {tabs.map(([tab, label]) => (
            <Link key={tab} to={`/sandboxes/$id/${tab}` as '/sandboxes/$id'} params={{ id }} className="tab">
              {label}
            </Link>
          ))}
        </nav>
      )}
      <div className="tab-body">
        <Outlet />
      </div>
    </div>
  )
}

/**
 * Returns whether the page has shown the terminals of the sandbox since the tab was opened. Their
 * text remains on the page after the sandbox was killed.
 */
function useShownTerminal(id: string, isRunning: boolean): boolean {
  const isTab = useLocation({ select: (location) => location.pathname.endsWith('/terminal') })
  const [shown, setShown] = useState<string>()
  useEffect(() => {
    if (!isTab) setShown(undefined)
    else if (isRunning) setShown(id)
  }, [id, isRunning, isTab])
  return isTab && shown === id
}

function FurtherPages({ id }: { id: string }) {
  return (
    <>
      <Link className="button" to="/sandboxes">
        All sandboxes
      </Link>
      <Link className="button" to="/snapshots" search={{ q: id }}>
        Snapshots of this sandbox
      </Link>
    </>
  )
}

/** Header of a killed sandbox whose terminals are still shown. */
function KilledHeader({ sandbox }: { sandbox: SandboxDetail }) {
  const id = sandbox.sandboxID
  return (
    <>
      <header className="page-head">
        <h1 className="truncate">{visible(sandbox.name ?? id)}</h1>
        <CopyId id={id} short />
        <div className="actions">
          <FurtherPages id={id} />
        </div>
      </header>
      <div className="problem-box" role="alert">
        <strong>This sandbox was killed</strong>
        <p>The text of its terminals remains until you leave this page.</p>
      </div>
    </>
  )
}

/** Time until the timeout, and the idle timeout. */
function Remaining({ sandbox }: { sandbox: SandboxDetail }) {
  const now = useNow()
  const left = remaining(sandbox.jiffy.deadline_ms, now)
  const idle = sandbox.jiffy.terms.idle_timeout_s
  if (sandbox.state !== 'running') return null
  if (left === null && !idle) return <span className="muted">no timeout</span>
  const action = sandbox.jiffy.terms.on_timeout === 'pause' ? 'pauses' : 'ends'
  return (
    <>
      {left !== null && (
        <span className={left < 60 ? 'badge warn plain' : 'muted'}>
          {action} in {countDown(left)}
        </span>
      )}
      {idle ? <span className="muted">pauses after {duration(idle)} without use</span> : null}
    </>
  )
}

type DialogName = 'rename' | 'fork' | 'snapshot' | 'timeouts' | 'kill' | 'restart' | 'promote' | 'commands'

function Header({ sandbox }: { sandbox: SandboxDetail }) {
  const id = sandbox.sandboxID
  const session = useSession()
  const refresh = useRefresh()
  const navigate = useNavigate()
  const [doing, setDoing] = useState<SandboxAction>()
  const [dialog, setDialog] = useState<DialogName>()

  const run = async (action: SandboxAction) => {
    setDoing(action)
    try {
      await action.run(id)
    } catch (error) {
      notify(messageOf(error), true)
    } finally {
      setDoing(undefined)
      refresh()
    }
  }
  const extend = async () => {
    const left = remaining(sandbox.jiffy.deadline_ms, Date.now()) ?? 0
    try {
      const timeout = Math.round(left + EXTENSION_S)
      await api.POST('/sandboxes/{sandboxID}/timeout', { params: { path: { sandboxID: id } }, body: { timeout } })
    } catch (error) {
      notify(messageOf(error), true)
    }
    refresh()
  }
  const pause = actionOf('pause')
  const resume = actionOf('resume')
  const isRunning = sandbox.state === 'running'
  const close = () => setDialog(undefined)
  return (
    <header className="page-head">
      <Link to="/sandboxes" className="muted">
        Sandboxes
      </Link>
      <span className="muted" aria-hidden="true">
        /
      </span>
      <h1 className="truncate">{visible(sandbox.name ?? id)}</h1>
      {session.mayChange && (
        <Button look="ghost" small icon="edit" label="Rename" onClick={() => setDialog('rename')} />
      )}
      <StateBadge
        state={sandbox.state}
        doing={doing && `${doing.doing.toLowerCase().replace(/ of$| a snapshot of$/, '')}…`}
      />
      <CopyId id={id} short />
      <Remaining sandbox={sandbox} />
      {session.mayChange && (
        <div className="actions">
          {isRunning && remaining(sandbox.jiffy.deadline_ms, Date.now()) !== null && (
            <Button icon="clock" onClick={() => void extend()}>
              +1 h
            </Button>
          )}
          {isRunning && (
            <Button icon="pause" busy={doing?.id === 'pause'} onClick={() => void run(pause)}>
              Pause
            </Button>
          )}
          {(sandbox.state === 'paused' || sandbox.state === 'broken') && (
            <Button icon="play" look="primary" busy={doing?.id === 'resume'} onClick={() => void run(resume)}>
              Resume
            </Button>
          )}
          {isRunning && (
            <Button icon="snapshots" onClick={() => setDialog('snapshot')}>
              Snapshot
            </Button>
          )}
          {isRunning && (
            <Button icon="fork" onClick={() => setDialog('fork')}>
              Fork
            </Button>
          )}
          <Button
            icon="back"
            onClick={() => void navigate({ to: '/sandboxes/$id/lineage' as '/sandboxes/$id', params: { id } })}>
            Roll back
          </Button>
          <Menu
            label="More actions"
            entries={[
              ...(isRunning || sandbox.state === 'paused'
                ? [{ label: 'Timeouts', icon: 'clock' as const, onSelect: () => setDialog('timeouts') }]
                : []),
              ...(isRunning
                ? [{ label: 'Restart', icon: 'restart' as const, onSelect: () => setDialog('restart') }]
                : []),
              ...(sandbox.forkedFrom
                ? [{ label: 'Promote', icon: 'check' as const, onSelect: () => setDialog('promote') }]
                : []),
              { label: 'As commands', icon: 'command' as const, onSelect: () => setDialog('commands') },
              'line' as const,
              { label: 'Kill', icon: 'kill' as const, danger: true, onSelect: () => setDialog('kill') },
            ]}
          />
        </div>
      )}
      {dialog === 'rename' && <RenameDialog sandbox={sandbox} onClose={close} />}
      {dialog === 'fork' && <ForkDialog sandbox={sandbox} onClose={close} />}
      {dialog === 'snapshot' && <SnapshotDialog sandbox={sandbox} onClose={close} />}
      {dialog === 'timeouts' && <TimeoutDialog sandbox={sandbox} onClose={close} />}
      {dialog === 'kill' && (
        <ConfirmDialog
          title={`Kill ${visible(sandbox.name ?? id)}?`}
          label="Kill"
          danger
          command={commands.kill(id)}
          onClose={close}
          run={() => api.DELETE('/sandboxes/{sandboxID}', { params: { path: { sandboxID: id } } })}
          onDone={() => void navigate({ to: '/sandboxes' })}>
          Memory and files of the sandbox are lost. Its snapshots remain.
        </ConfirmDialog>
      )}
      {dialog === 'restart' && (
        <ConfirmDialog
          title="Restart the sandbox?"
          label="Restart"
          command={commands.restart(id)}
          onClose={close}
          run={() => actionOf('restart').run(id)}>
          All processes are stopped, and the start command of the template runs. Files remain.
        </ConfirmDialog>
      )}
      {dialog === 'promote' && <PromoteDialog id={id} onClose={close} />}
      {dialog === 'commands' && (
        <Dialog title="Commands" wide onClose={close}>
          {[pause, resume, actionOf('snapshot'), actionOf('restart'), actionOf('kill')].map((action) => (
            <div key={action.id} className="field">
              <span className="label">{action.label}</span>
              <AsCommand command={action.command(id)} />
            </div>
          ))}
          <div className="field">
            <span className="label">Fork</span>
            <AsCommand command={commands.fork(id, 1)} />
          </div>
          <div className="field">
            <span className="label">+1 h</span>
            <AsCommand command={commands.timeout(id, { timeout: EXTENSION_S })} />
          </div>
        </Dialog>
      )}
    </header>
  )
}

function RenameDialog({ sandbox, onClose }: { sandbox: SandboxDetail; onClose: () => void }) {
  const [name, setName] = useState(sandbox.name ?? '')
  const id = sandbox.sandboxID
  return (
    <ConfirmDialog
      title="Rename the sandbox"
      label="Rename"
      command={commands.rename(id, name)}
      onClose={onClose}
      run={() =>
        api.PATCH('/sandboxes/{sandboxID}', { params: { path: { sandboxID: id } }, body: { name: name || null } })
      }>
      <Field
        id="new-name"
        label="Name"
        hint="1 to 63 letters, digits, dots, hyphens and underscores. Empty to remove the name">
        <input
          id="new-name"
          className="input"
          value={name}
          maxLength={63}
          autoFocus
          onChange={(e) => setName(e.target.value)}
        />
      </Field>
    </ConfirmDialog>
  )
}

function SnapshotDialog({ sandbox, onClose }: { sandbox: SandboxDetail; onClose: () => void }) {
  const [name, setName] = useState('')
  const id = sandbox.sandboxID
  return (
    <ConfirmDialog
      title="Take a snapshot"
      label="Take the snapshot"
      command={commands.snapshot(id, name || undefined)}
      onClose={onClose}
      run={() =>
        api.POST('/sandboxes/{sandboxID}/snapshots', {
          params: { path: { sandboxID: id } },
          body: name ? { name } : {},
        })
      }
      onDone={() => notify('The snapshot is stored')}>
      <Field
        id="snapshot-name"
        label="Name"
        hint="Optional. Memory, processes and files are stored; the sandbox continues to run.">
        <input id="snapshot-name" className="input" value={name} autoFocus onChange={(e) => setName(e.target.value)} />
      </Field>
    </ConfirmDialog>
  )
}

export function PromoteDialog({ id, onClose }: { id: string; onClose: () => void }) {
  return (
    <ConfirmDialog
      title="Promote this fork?"
      label="Promote"
      command={commands.promote(id)}
      onClose={onClose}
      run={() => api.POST('/sandboxes/{sandboxID}/promote', { params: { path: { sandboxID: id } } })}>
      This child of the fork remains. All its siblings are removed.
    </ConfirmDialog>
  )
}

export function ForkDialog({
  sandbox,
  onClose,
}: {
  sandbox: { sandboxID: string; name?: string }
  onClose: () => void
}) {
  const [number, setNumber] = useState('1')
  const id = sandbox.sandboxID
  const count = Math.min(MAX_FORK, Math.max(1, Number(number) || 1))
  const run = async () => {
    const { started, failure } = await fork(id, count)
    if (failure) {
      if (started === 0) throw new Error(failure)
      notify(failure, true)
    }
    notify(`Started ${started} ${started === 1 ? 'fork' : 'forks'}`)
  }
  return (
    <ConfirmDialog
      title={`Fork ${visible(sandbox.name ?? id)}`}
      label={`Fork ${count}`}
      command={commands.fork(id, count)}
      onClose={onClose}
      run={run}>
      <Field
        id="fork-count"
        label="Number of copies"
        hint="Each copy has the memory, processes and files of this moment. The sandbox continues to run.">
        <input
          id="fork-count"
          className="input"
          type="number"
          min={1}
          max={MAX_FORK}
          autoFocus
          value={number}
          onChange={(e) => setNumber(e.target.value)}
        />
      </Field>
    </ConfirmDialog>
  )
}
