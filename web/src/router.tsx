import { createRootRoute, createRoute, createRouter, lazyRouteComponent, Navigate } from '@tanstack/react-router'
import { Shell } from './shell'
import { Empty, Problem } from './ui/controls'
import { SandboxesPage } from './pages/sandboxes'
import { OverviewPage } from './pages/overview'

const root = createRootRoute({
  component: Shell,
  notFoundComponent: () => <Empty isPage title="This page does not exist" />,
  errorComponent: ({ error }) => (
    <div className="page">
      <Problem error={error} onRetry={() => location.reload()} />
    </div>
  ),
})

/** Search parameters that are texts. Others are dropped. */
function texts<K extends string>(...keys: K[]) {
  return (search: Record<string, unknown>): Partial<Record<K, string>> => {
    const found: Partial<Record<K, string>> = {}
    for (const key of keys) {
      const value = search[key]
      if (typeof value === 'string' && value !== '') found[key] = value
      else if (typeof value === 'number' || typeof value === 'boolean') found[key] = String(value)
    }
    return found
  }
}

export const overviewRoute = createRoute({ getParentRoute: () => root, path: '/overview', component: OverviewPage })

export const sandboxesRoute = createRoute({
  getParentRoute: () => root,
  path: '/sandboxes',
  validateSearch: texts('q', 'state', 'template', 'engine', 'key', 'host', 'meta', 'group', 'sort', 'columns'),
  component: SandboxesPage,
})

export const newRoute = createRoute({
  getParentRoute: () => root,
  path: '/new',
  validateSearch: texts('template', 'snapshot'),
  component: SandboxesPage,
})

export const sandboxRoute = createRoute({
  getParentRoute: () => root,
  path: '/sandboxes/$id',
  component: lazyRouteComponent(() => import('./pages/sandbox'), 'SandboxPage'),
})

const tab = (path: string, load: () => Promise<Record<string, unknown>>, name: string, search: string[] = []) =>
  createRoute({
    getParentRoute: () => sandboxRoute,
    path,
    validateSearch: texts(...search),
    component: lazyRouteComponent(load as never, name as never),
  })

const tabs = [
  createRoute({ getParentRoute: () => sandboxRoute, path: '/', component: DefaultTab }),
  tab('terminal', () => import('./sandbox/terminal-tab'), 'TerminalTab'),
  tab('files', () => import('./sandbox/files-tab'), 'FilesTab', ['path', 'file']),
  tab('charts', () => import('./sandbox/charts-tab'), 'ChartsTab', ['range']),
  tab('console', () => import('./sandbox/tabs'), 'ConsoleTab', ['q']),
  tab('processes', () => import('./sandbox/processes-tab'), 'ProcessesTab', ['q', 'sort']),
  tab('connections', () => import('./sandbox/tabs'), 'ConnectionsTab', ['q', 'verdict']),
  tab('ports', () => import('./sandbox/tabs'), 'PortsTab'),
  tab('lineage', () => import('./sandbox/lineage-tab'), 'LineageTab', ['at']),
  tab('details', () => import('./sandbox/details-tab'), 'DetailsTab'),
]

function DefaultTab() {
  const { id } = sandboxRoute.useParams()
  return <Navigate to={'/sandboxes/$id/terminal' as '/sandboxes/$id'} params={{ id }} replace />
}

export const snapshotsRoute = createRoute({
  getParentRoute: () => root,
  path: '/snapshots',
  validateSearch: texts('q', 'purpose', 'sort'),
  component: lazyRouteComponent(() => import('./pages/snapshots'), 'SnapshotsPage'),
})

export const lineageRoute = createRoute({
  getParentRoute: () => root,
  path: '/lineage',
  validateSearch: texts('at', 'of'),
  component: lazyRouteComponent(() => import('./pages/lineage'), 'LineagePage'),
})

export const compareRoute = createRoute({
  getParentRoute: () => root,
  path: '/compare',
  validateSearch: texts('a', 'b', 'path', 'q'),
  component: lazyRouteComponent(() => import('./pages/compare'), 'ComparePage'),
})

export const templatesRoute = createRoute({
  getParentRoute: () => root,
  path: '/templates',
  validateSearch: texts('q', 'build', 'sort'),
  component: lazyRouteComponent(() => import('./pages/templates'), 'TemplatesPage'),
})

export const keysRoute = createRoute({
  getParentRoute: () => root,
  path: '/keys',
  validateSearch: texts('q', 'state', 'scope', 'sort', 'use'),
  component: lazyRouteComponent(() => import('./pages/keys'), 'KeysPage'),
})

export const functionsRoute = createRoute({
  getParentRoute: () => root,
  path: '/functions',
  validateSearch: texts('q', 'state', 'sort'),
  component: lazyRouteComponent(() => import('./pages/functions'), 'FunctionsPage'),
})

export const functionRoute = createRoute({
  getParentRoute: () => root,
  path: '/functions/$name',
  validateSearch: texts('tab', 'q', 'stream'),
  component: lazyRouteComponent(() => import('./pages/function'), 'FunctionPage'),
})

export const hostsRoute = createRoute({
  getParentRoute: () => root,
  path: '/hosts',
  validateSearch: texts('q', 'state', 'sort'),
  component: lazyRouteComponent(() => import('./pages/hosts'), 'HostsPage'),
})

export const auditRoute = createRoute({
  getParentRoute: () => root,
  path: '/audit',
  validateSearch: texts('call', 'key', 'address', 'result'),
  component: lazyRouteComponent(() => import('./pages/audit'), 'AuditPage'),
})

const indexRoute = createRoute({
  getParentRoute: () => root,
  path: '/',
  component: () => <Navigate to="/sandboxes" replace />,
})

const tree = root.addChildren([
  indexRoute,
  overviewRoute,
  sandboxesRoute,
  newRoute,
  sandboxRoute.addChildren(tabs),
  snapshotsRoute,
  lineageRoute,
  compareRoute,
  templatesRoute,
  keysRoute,
  functionsRoute,
  functionRoute,
  hostsRoute,
  auditRoute,
])

export function createAppRouter() {
  return createRouter({ routeTree: tree, defaultPreload: 'intent', defaultPendingMs: 200 })
}

declare module '@tanstack/react-router' {
  interface Register {
    router: ReturnType<typeof createAppRouter>
  }
}
