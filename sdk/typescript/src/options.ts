// Bodies of requests from the options of `e2b`.
import { InvalidArgumentError, type SandboxNetworkOpts, type SandboxNetworkUpdate, type SandboxOpts } from 'e2b'
import { seconds } from './calls.js'
import type { EngineName, Json } from './models.js'

const ALL_TRAFFIC = '0.0.0.0/0'

/** Options of a create: the options of `e2b`, and the options of Jiffy. */
export interface SandboxOptions extends SandboxOpts {
  /** Name, unique among the key's sandboxes. Calls accept the name instead of the id. */
  name?: string
  /**
   * Image of a registry, for example `python:3.12`, instead of a template. It is imported first, unless it is unchanged
   * since its last import.
   */
  image?: string
  /** Receives the lines of the log of an import. */
  onImageLog?: (line: string) => void
  /** Defaults to the snapshot's or the host's engine. */
  engine?: EngineName
  /** Virtual CPUs. Defaults to the template's number. */
  cpuCount?: number
  /** Memory in MiB. Defaults to the template's size. */
  memoryMB?: number
  /** Writable disk in MiB. Defaults to the template's size. */
  diskSizeMB?: number
  /** Certificate authorities that the sandbox's programs trust, in PEM. */
  caCertificates?: string
  /** Proxy of the sandbox's programs, with the fields of `Proxy` in the API. */
  egressProxy?: Json
  /** Private network to join. Sandboxes of the same key in a network reach each other by name. */
  join?: string
  /** Pauses the sandbox after this time without use, in milliseconds. Defaults to the template's or the key's. */
  idleTimeoutMs?: number
  /** A repeated create with the same key returns the same sandbox. Defaults to a random key. */
  idempotencyKey?: string
}

type Selector = string[] | ((context: any) => string[]) | undefined

/** Placeholders of identity tokens. Without `names`, each name is accepted. */
function placeholders(names?: string[]): Record<string, string> {
  const get = (_: object, name: string | symbol) => {
    if (typeof name === 'symbol') return undefined
    if (names && !names.includes(name)) {
      throw new InvalidArgumentError(`the identity token ${JSON.stringify(name)} is not in iam.tokens`)
    }
    return `\${e2b.identity.tokens.${name}}`
  }
  return new Proxy({}, { get })
}

/** Returns rules whose changes of requests are values instead of functions. */
function rulesBody(rules: Json | undefined, tokens?: string[]): Json | undefined {
  const context = { iam: { tokens: placeholders(tokens) } }
  const resolved = (rule: Json) =>
    typeof rule.transform === 'function' ? { ...rule, transform: rule.transform(context) as Json } : rule
  const hosts = Object.entries((rules ?? {}) as Record<string, Json[]>)
  return rules && Object.fromEntries(hosts.map(([host, entries]) => [host, entries.map(resolved)]))
}

/** Returns the proxy of a request. */
function proxyBody(proxy: Json | undefined): Json | undefined {
  if (!proxy?.tls) return proxy && { ...proxy, tls: undefined }
  return { ...proxy, tls: { ...(proxy.tls as object), enabled: true } }
}

/**
 * Returns the network rules of a request. `tokens` are the names of the identity tokens of a new
 * sandbox.
 */
export function networkBody(
  network: SandboxNetworkOpts | SandboxNetworkUpdate | undefined,
  tokens?: string[]
): Json | undefined {
  if (!network) return undefined
  const { allowOut, denyOut, allowInternetAccess, ...rest } = network as Json
  const rules = new Map(Object.entries((rest.rules as Json | undefined) ?? {}))
  const list = (selector: Selector) =>
    typeof selector === 'function' ? [...selector({ allTraffic: ALL_TRAFFIC, rules })] : selector
  return {
    ...rest,
    rules: rulesBody(rest.rules as Json | undefined, tokens),
    egressProxy: proxyBody(rest.egressProxy as Json | undefined),
    allowOut: list(allowOut as Selector),
    denyOut: list(denyOut as Selector),
    allow_internet_access: allowInternetAccess as boolean | undefined,
  }
}

/** Returns the body of a create. */
export function createBody(template: string, options: SandboxOptions): Json {
  const { lifecycle, volumeMounts } = options
  const network = networkBody(options.network, Object.keys(options.iam?.tokens ?? {}))
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
    network: options.join === undefined ? network : { ...network, join: options.join },
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
