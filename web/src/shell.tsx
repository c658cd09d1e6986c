import { lazy, Suspense, useEffect, useState } from 'react'
import { Link, Outlet, useNavigate } from '@tanstack/react-router'
import { useQueryClient } from '@tanstack/react-query'
import { callJson, CallError } from './api/client'
import { useSession } from './session'
import { useLiveEvents } from './api/live-events'
import { useFleet, useSandboxes } from './api/queries'
import { Button, Menu } from './ui/controls'
import { Icon, type IconName, Logo } from './ui/icons'
import { isTyping } from './lib/keyboard'
import { visible } from './lib/visible'
import { setTheme, type Theme, theme } from './ui/theme'
import { Toasts } from './ui/toast'

const Palette = lazy(() => import('./ui/palette').then((m) => ({ default: m.Palette })))
const KeyHelp = lazy(() => import('./ui/palette').then((m) => ({ default: m.KeyHelp })))

const pages: { to: string; label: string; icon: IconName; key: string }[] = [
  { to: '/overview', label: 'Overview', icon: 'overview', key: 'o' },
  { to: '/sandboxes', label: 'Sandboxes', icon: 'sandboxes', key: 's' },
  { to: '/snapshots', label: 'Snapshots', icon: 'snapshots', key: 'n' },
  { to: '/lineage', label: 'Lineage', icon: 'lineage', key: 'l' },
  { to: '/templates', label: 'Templates', icon: 'templates', key: 't' },
  { to: '/functions', label: 'Functions', icon: 'functions', key: 'f' },
  { to: '/hosts', label: 'Hosts', icon: 'hosts', key: 'h' },
  { to: '/keys', label: 'Keys', icon: 'keys', key: 'k' },
  { to: '/audit', label: 'Audit', icon: 'audit', key: 'a' },
]

export function Shell() {
  const session = useSession()
  const navigate = useNavigate()
  const queries = useQueryClient()
  const [overlay, setOverlay] = useState<'palette' | 'keys' | null>(null)
  const [current, setCurrent] = useState<Theme>(theme())
  useLiveEvents()
  const isFleet = !!useFleet(session.isAdmin).data
  // The address of the page works without a fleet, too: the page explains the command.
  const isShown: Record<string, boolean> = { '/hosts': isFleet, '/audit': session.isAdmin }
  const shown = pages.filter((page) => isShown[page.to] ?? true)

  useEffect(() => {
    let isGo = false
    const onKey = (event: KeyboardEvent) => {
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === 'k') {
        if ((event.target as HTMLElement | null)?.closest('.xterm')) return
        event.preventDefault()
        setOverlay('palette')
        return
      }
      if (isTyping(event)) return
      const page = isGo && pages.find((p) => p.key === event.key)
      isGo = event.key === 'g'
      if (page) {
        event.preventDefault()
        void navigate({ to: page.to })
      } else if (event.key === '?') {
        setOverlay('keys')
      } else if (event.key === 'c') {
        if (session.mayChange) void navigate({ to: '/new' })
      } else if (event.key === '/') {
        const search = document.querySelector<HTMLInputElement>('input[type=search]')
        if (search) {
          event.preventDefault()
          search.focus()
        }
      }
    }
    addEventListener('keydown', onKey)
    return () => removeEventListener('keydown', onKey)
  }, [navigate, session.mayChange])

  const signOut = async () => {
    await callJson('DELETE', '/session').catch(() => {})
    queries.clear()
    location.assign('/')
  }
  const who = session.scope === 'owner' ? 'owner of the host' : (session.keyName ?? 'key')
  const select = (next: Theme) => () => {
    setTheme(next)
    setCurrent(next)
  }

  return (
    <div className="app">
      <nav className="side" aria-label="Pages">
        <Link to="/sandboxes" className="brand" activeProps={{}} aria-label="Jiffy">
          <Logo />
          <span>Jiffy</span>
        </Link>
        {shown.map((page) => (
          <Link key={page.to} to={page.to} className="nav-link">
            <Icon name={page.icon} />
            {page.label}
          </Link>
        ))}
        <div className="side-foot">
          <Button
            small
            icon="search"
            className="palette-button"
            onClick={() => setOverlay('palette')}
            title="Go to a page or object">
            <span className="grow">Go to…</span> <kbd>Ctrl K</kbd>
          </Button>
          <div className="row">
            <div className="who grow">
              <div className="truncate" title={who}>
                <strong>{visible(who)}</strong>
              </div>
              <div className="muted">{session.scope === 'owner' ? 'all permissions' : `scope ${session.scope}`}</div>
            </div>
            <Menu
              label="Session"
              trigger={<Button small look="ghost" icon="more" label={`Session: ${who}`} />}
              entries={[
                {
                  label: `Theme: system${current === 'system' ? ' ✓' : ''}`,
                  icon: 'theme',
                  onSelect: select('system'),
                },
                { label: `Theme: light${current === 'light' ? ' ✓' : ''}`, icon: 'theme', onSelect: select('light') },
                { label: `Theme: dark${current === 'dark' ? ' ✓' : ''}`, icon: 'theme', onSelect: select('dark') },
                'line',
                { label: 'Keyboard shortcuts', icon: 'command', onSelect: () => setOverlay('keys') },
                { label: 'Sign out', icon: 'signOut', onSelect: () => void signOut() },
              ]}
            />
          </div>
        </div>
      </nav>
      <main className="main" id="main">
        <ConnectionBanner />
        <Outlet />
      </main>
      <Toasts />
      <Suspense>
        {overlay === 'palette' && <Palette onClose={() => setOverlay(null)} />}
        {overlay === 'keys' && <KeyHelp onClose={() => setOverlay(null)} />}
      </Suspense>
    </div>
  )
}

/** Shown while the daemon cannot be reached. The page reconnects without user action. */
function ConnectionBanner() {
  const sandboxes = useSandboxes()
  const reason = sandboxes.failureReason ?? sandboxes.error
  if (!(reason instanceof CallError) || reason.status !== 0) return null
  return (
    <div className="banner" role="status">
      The daemon cannot be reached. Reconnecting…
    </div>
  )
}
