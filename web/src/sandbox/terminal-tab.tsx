import '@xterm/xterm/css/xterm.css'
import { useCallback, useEffect, useRef, useState } from 'react'
import { useParams } from '@tanstack/react-router'
import { callJson, guestPath, isNotFound, messageOf } from '../api/client'
import { useSandbox } from '../api/queries'
import { useSession } from '../session'
import type { Ending } from '../live/socket'
import { Pane } from '../live/terminal'
import { visible } from '../lib/visible'
import { Button, Dialog, Empty } from '../ui/controls'

/** A tab with a terminal. */
interface Tab {
  key: number
  terminal?: string
  user?: string
  shell?: string
  ending?: Ending
  failure?: string
}

interface Listed {
  id: string
  pid: number
  user: string | null
  startedMs: number
  status: { state: string; reason?: string }
}

let nextKey = 1

export function TerminalTab() {
  const { id } = useParams({ strict: false }) as { id: string }
  const query = useSandbox(id)
  const sandbox = query.data
  const session = useSession()
  const [tabs, setTabs] = useState<Tab[]>()
  const [active, setActive] = useState<number>()
  const [user, setUser] = useState('')
  const [shell, setShell] = useState('')
  const [fontSize, setFontSize] = useState(13)
  const [screenReader, setScreenReader] = useState(false)
  const [isFull, setFull] = useState(false)
  const [searched, setSearched] = useState<string>()
  const pane = useRef<Pane>(null)
  // The cached answer about a removed sandbox has its former state.
  const isKilled = isNotFound(query.error) || sandbox?.state === 'killed'
  const isRunning = sandbox?.state === 'running' && !isKilled

  const add = useCallback((settings: Omit<Tab, 'key'> = {}) => {
    const tab = { key: nextKey++, ...settings }
    setTabs((all) => [...(all ?? []), tab])
    setActive(tab.key)
  }, [])
  const change = useCallback((key: number, update: Partial<Tab>) => {
    setTabs((all) => all?.map((tab) => (tab.key === key ? { ...tab, ...update } : tab)))
  }, [])

  // Terminals of this sandbox that still run are shown again, also after a reload.
  useEffect(() => {
    if (!isRunning || tabs || !session.mayChange) return
    let ignore = false
    callJson<{ terminals: Listed[] }>('GET', `${guestPath(id)}/terminals`).then(
      ({ terminals }) => {
        if (ignore) return
        const list = terminals
          .filter((t) => t.status.state === 'running')
          .map((t): Tab => ({ key: nextKey++, terminal: t.id, user: t.user ?? undefined }))
        if (list.length === 0) list.push({ key: nextKey++ })
        setTabs(list)
        setActive(list.at(-1)?.key)
      },
      (error: unknown) => {
        if (ignore) return
        const failed = { key: nextKey++, failure: messageOf(error) }
        setTabs([failed])
        setActive(failed.key)
      },
    )
    return () => {
      ignore = true
    }
  }, [id, isRunning, tabs, session.mayChange])

  const shown = tabs?.find((tab) => tab.key === active)
  const close = (key: number) => {
    const rest = (tabs ?? []).filter((tab) => tab.key !== key)
    setTabs(rest)
    if (active === key) setActive(rest.at(-1)?.key)
  }

  if (!session.mayChange) {
    return (
      <Empty title="No terminal with this key">
        <p>
          A key of scope <code>read</code> cannot use sandboxes. Use a key of scope <code>create</code> or{' '}
          <code>admin</code>.
        </p>
      </Empty>
    )
  }
  if (isKilled && !tabs?.length) return <Empty title="No terminal is open" />
  if (sandbox && !isRunning && !tabs?.length) {
    return (
      <Empty title={`The sandbox is ${sandbox.state}`}>
        <p>Resume the sandbox to open a terminal.</p>
      </Empty>
    )
  }
  return (
    <div className={`terminal-tab${isFull ? ' full' : ''}`}>
      <div className="terminal-bar">
        <div className="row">
          <div className="row" role="tablist" aria-label="Terminals">
            {tabs?.map((tab, index) => (
              <button
                key={tab.key}
                type="button"
                role="tab"
                className="terminal-name"
                aria-selected={tab.key === active}
                onClick={() => setActive(tab.key)}>
                {index + 1}
                {tab.user ? ` ${visible(tab.user)}` : ''}
                {tab.ending ? ` (${tab.ending.state})` : ''}
              </button>
            ))}
          </div>
          {shown && (
            <Button
              look="ghost"
              small
              icon="kill"
              label="End this terminal"
              onClick={() => {
                pane.current?.end()
                close(shown.key)
              }}
            />
          )}
          <Button
            look="ghost"
            small
            icon="plus"
            label="New terminal"
            disabled={!isRunning}
            onClick={() => add({ user: user || undefined, shell: shell || undefined })}
          />
        </div>
        <div className="row">
          <input
            className="input tiny"
            aria-label="User of new terminals"
            placeholder="user"
            value={user}
            onChange={(e) => setUser(e.target.value)}
          />
          <input
            className="input tiny"
            aria-label="Shell of new terminals"
            placeholder="shell"
            list="shells"
            value={shell}
            onChange={(e) => setShell(e.target.value)}
          />
          <datalist id="shells">
            <option value="bash" />
            <option value="sh" />
            <option value="zsh" />
          </datalist>
          <Button
            look="ghost"
            small
            icon="search"
            label="Search"
            aria-pressed={searched !== undefined}
            onClick={() => setSearched(searched === undefined ? '' : undefined)}
          />
          <Button look="ghost" small icon="copy" label="Copy (Ctrl Shift C)" onClick={() => pane.current?.copy()} />
          <Button
            look="ghost"
            small
            icon="file"
            label="Paste (Ctrl Shift V)"
            onClick={() => {
              void navigator.clipboard.readText().then(
                (text) => pane.current?.paste(text),
                () => {},
              )
            }}
          />
          <Button look="ghost" small label="Smaller text" onClick={() => setFontSize(Math.max(9, fontSize - 1))}>
            A−
          </Button>
          <Button look="ghost" small label="Larger text" onClick={() => setFontSize(Math.min(24, fontSize + 1))}>
            A+
          </Button>
          <Button
            look="ghost"
            small
            label="Screen reader mode"
            aria-pressed={screenReader}
            onClick={() => setScreenReader(!screenReader)}>
            SR
          </Button>
          <Button
            look="ghost"
            small
            icon="expand"
            label={isFull ? 'Leave full screen' : 'Full screen'}
            aria-pressed={isFull}
            onClick={() => setFull(!isFull)}
          />
        </div>
      </div>
      {searched !== undefined && (
        <form
          className="terminal-search"
          onSubmit={(e) => {
            e.preventDefault()
            pane.current?.search.findPrevious(searched)
          }}>
          <input
            className="input"
            autoFocus
            aria-label="Search in the terminal"
            placeholder="Search"
            value={searched}
            onChange={(e) => setSearched(e.target.value)}
            onKeyDown={(e) => {
              if (e.key === 'Escape') setSearched(undefined)
            }}
          />
          <Button small onClick={() => pane.current?.search.findPrevious(searched)}>
            Previous
          </Button>
          <Button small onClick={() => pane.current?.search.findNext(searched)}>
            Next
          </Button>
        </form>
      )}
      {tabs?.map((tab) => (
        <TerminalPane
          key={tab.key}
          tab={tab}
          sandbox={id}
          isActive={tab.key === active}
          fontSize={fontSize}
          screenReader={screenReader}
          onPane={(created) => {
            if (tab.key === active) pane.current = created
          }}
          onChange={change}
        />
      ))}
      {tabs?.length === 0 && (
        <Empty title="No terminal is open">
          <Button icon="plus" disabled={!isRunning} onClick={() => add()}>
            New terminal
          </Button>
        </Empty>
      )}
      {(shown?.ending || shown?.failure) && (
        <div className="terminal-ending" role="status">
          <span>{shown.failure ? visible(shown.failure) : shown.ending && endingText(shown.ending)}</span>
          <Button
            small
            icon="plus"
            disabled={!isRunning}
            onClick={() => {
              close(shown.key)
              add({ user: shown.user, shell: shown.shell })
            }}>
            New terminal
          </Button>
        </div>
      )}
    </div>
  )
}

function endingText({ state, reason }: Ending): string {
  const what =
    state === 'exited' ? 'The shell has ended' : 'The terminal was lost, for example by a pause or a rollback'
  return `${what}: ${visible(reason)}.`
}

/** Returns the text about a missing connection. A terminal that was not opened may have no shell. */
function connectionText(hasOpened: boolean, hasEnded: boolean): string {
  if (!hasOpened) return 'No connection to the daemon. Connecting.'
  return hasEnded
    ? 'The connection was lost. Reconnecting.'
    : 'The connection was lost. Reconnecting; the shell continues to run.'
}

function TerminalPane({
  tab,
  sandbox,
  isActive,
  fontSize,
  screenReader,
  onPane,
  onChange,
}: {
  tab: Tab
  sandbox: string
  isActive: boolean
  fontSize: number
  screenReader: boolean
  onPane: (pane: Pane) => void
  onChange: (key: number, update: Partial<Tab>) => void
}) {
  const element = useRef<HTMLDivElement>(null)
  const pane = useRef<Pane>(undefined)
  const [isConnected, setConnected] = useState(true)
  const [hasOpened, setHasOpened] = useState(false)
  const [paste, setPaste] = useState<{ text: string; paste: () => void }>()
  const [link, setLink] = useState<string>()
  const first = useRef(tab)

  useEffect(() => {
    const parent = element.current
    const { key, terminal, user, shell, failure } = first.current
    if (!parent || failure) return
    const created = new Pane(
      parent,
      { sandbox, terminal, user, shell, fontSize, screenReader },
      {
        onOpened: (opened) => {
          first.current = { ...first.current, terminal: opened }
          setHasOpened(true)
          onChange(key, { terminal: opened, ending: undefined, failure: undefined })
        },
        onEnding: (ending) => onChange(key, { ending }),
        onFailed: (message) => onChange(key, { failure: message }),
        onConnection: setConnected,
        confirmPaste: (text, run) => setPaste({ text, paste: run }),
        confirmLink: setLink,
      },
    )
    pane.current = created
    return () => created.dispose(parent)
  }, [sandbox, onChange])
  useEffect(() => {
    if (!isActive || !pane.current) return
    onPane(pane.current)
    pane.current.term.focus()
  }, [isActive])
  useEffect(() => pane.current?.setFontSize(fontSize), [fontSize])
  useEffect(() => pane.current?.setScreenReader(screenReader), [screenReader])

  return (
    <div className="terminal-pane" hidden={!isActive}>
      {!isConnected && (
        <div className="banner" role="status">
          {connectionText(hasOpened, tab.ending !== undefined)}
        </div>
      )}
      <div className="terminal-screen" ref={element} />
      {paste && (
        <Dialog
          title={`Paste ${paste.text.split(/\r\n|\r|\n/).length} lines?`}
          onClose={() => setPaste(undefined)}
          description="A shell executes each line at once.">
          <pre className="paste mono" tabIndex={0}>
            {visible(paste.text.slice(0, 4000))}
          </pre>
          <div className="buttons">
            <Button onClick={() => setPaste(undefined)}>Cancel</Button>
            <Button
              look="primary"
              autoFocus
              onClick={() => {
                paste.paste()
                setPaste(undefined)
                pane.current?.term.focus()
              }}>
              Paste
            </Button>
          </div>
        </Dialog>
      )}
      {link && (
        <Dialog
          title="Open this link?"
          onClose={() => setLink(undefined)}
          description="The output of the sandbox contains the link.">
          <pre className="paste mono" tabIndex={0}>
            {visible(link)}
          </pre>
          <div className="buttons">
            <Button onClick={() => setLink(undefined)}>Cancel</Button>
            <a
              className="button primary"
              href={link}
              target="_blank"
              rel="noopener noreferrer"
              onClick={() => setLink(undefined)}>
              Open
            </a>
          </div>
        </Dialog>
      )}
    </div>
  )
}
