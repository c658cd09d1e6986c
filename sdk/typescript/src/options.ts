// Bodies of requests from the options of `e2b`.
import type { SandboxNetworkOpts, SandboxNetworkUpdate } from 'e2b'
import { seconds } from './calls.js'
import type { Json } from './models.js'
import type { SandboxOptions } from './sandbox.js'

const ALL_TRAFFIC = '0.0.0.0/0'

type Selector = string[] | ((context: any) => string[]) | undefined

/** Returns the network rules of a request. */
export function networkBody(network: SandboxNetworkOpts | SandboxNetworkUpdate | undefined): Json | undefined {
  if (!network) return undefined
  const { allowOut, denyOut, allowInternetAccess, ...rest } = network as Json
  const rules = new Map(Object.entries((rest.rules as Json | undefined) ?? {}))
  const list = (selector: Selector) =>
    typeof selector === 'function' ? [...selector({ allTraffic: ALL_TRAFFIC, rules })] : selector
  return {
    ...rest,
    allowOut: list(allowOut as Selector),
    denyOut: list(denyOut as Selector),
    allow_internet_access: allowInternetAccess as boolean | undefined,
  }
}

/** Returns the body of a create. */
export function createBody(template: string, options: SandboxOptions): Json {
  const { lifecycle, volumeMounts } = options
  const onTimeout = lifecycle?.onTimeout as string | { action: string; keepMemory?: boolean } | undefined
  const action = typeof onTimeout === 'string' ? onTimeout : onTimeout?.action
  const mounts = Object.entries(volumeMounts ?? {}).map(([path, volume]) => ({
    name: typeof volume === 'string' ? volume : volume.name,
    path,
  }))
  return {
    templateID: template,
    timeout: seconds(options.timeoutMs),
    metadata: options.metadata,
    envVars: options.envs,
    allow_internet_access: options.allowInternetAccess,
    network: networkBody(options.network),
    autoPause: action === undefined ? undefined : action === 'pause',
    autoPauseMemory: typeof onTimeout === 'object' ? onTimeout.keepMemory : undefined,
    autoResume: lifecycle?.autoResume === undefined ? undefined : { enabled: lifecycle.autoResume },
    volumeMounts: mounts.length > 0 ? mounts : undefined,
    mcp: options.mcp,
    iam: options.iam,
    name: options.name,
    engine: options.engine,
    cpuCount: options.cpuCount,
    memoryMB: options.memoryMB,
    diskSizeMB: options.diskSizeMB,
    caCertificates: options.caCertificates,
    proxy: options.egressProxy,
    idleTimeout: seconds(options.idleTimeoutMs),
  }
}
