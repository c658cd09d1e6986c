/** An action as the commands that users can run instead. */
export interface Command {
  /** Words of the `jiffy` command line. `undefined` if it has no equivalent. */
  jiffy?: string[]
  /** Python statements with the package `e2b`. `undefined` if it has no equivalent. */
  python?: string
  /** Call of the API. */
  method: string
  path: string
  body?: unknown
}

/** Quotes a word for a POSIX shell. */
export function shellWord(word: string): string {
  if (/^[A-Za-z0-9_@%+=:,./-]+$/.test(word)) return word
  return `'${word.replaceAll("'", `'\\''`)}'`
}

/** Quotes a string as a Python literal. */
export function pythonString(text: string): string {
  // A JSON string is a Python literal, except that surrogates and U+007F must be escaped, too.
  return JSON.stringify(text)
    .replace(/[\u007f-\uffff]/g, (unit) => {
      return `\\u${unit.charCodeAt(0).toString(16).padStart(4, '0')}`
    })
    .replace(/\\u(d[89ab]..)\\u(d[c-f]..)/g, (_, high: string, low: string) => {
      const code = 0x10000 + ((parseInt(high, 16) - 0xd800) << 10) + (parseInt(low, 16) - 0xdc00)
      return `\\U${code.toString(16).padStart(8, '0')}`
    })
}

/** Converts a JSON value to a Python literal. */
export function pythonValue(value: unknown): string {
  if (value === null || value === undefined) return 'None'
  if (value === true) return 'True'
  if (value === false) return 'False'
  if (typeof value === 'number') return String(value)
  if (typeof value === 'string') return pythonString(value)
  if (Array.isArray(value)) return `[${value.map(pythonValue).join(', ')}]`
  const pairs = Object.entries(value as object).filter(([, v]) => v !== undefined)
  return `{${pairs.map(([k, v]) => `${pythonString(k)}: ${pythonValue(v)}`).join(', ')}}`
}

export function jiffyLine(command: Command): string | undefined {
  return command.jiffy && ['jiffy', ...command.jiffy].map(shellWord).join(' ')
}

export function pythonLines(command: Command): string | undefined {
  return command.python && `from e2b import Sandbox\n\n${command.python}`
}

export function curlLine(command: Command): string {
  const words = ['curl', '--fail-with-body']
  if (command.method !== 'GET') words.push('-X', command.method)
  const text = words.join(' ')
  const body = command.body === undefined ? '' : ` --json ${shellWord(JSON.stringify(command.body))}`
  return `${text} -H "X-API-KEY: $E2B_API_KEY" "$E2B_API_URL"${shellWord(command.path)}${body}`
}

const id = encodeURIComponent

/** The commands of all actions on sandboxes and snapshots. */
export const commands = {
  create(body: Record<string, unknown>, isSnapshot = false): Command {
    const words = ['create']
    const option = (name: string, value: unknown) => {
      if (value !== undefined && value !== null && value !== '') words.push(`${name}=${String(value)}`)
    }
    option(isSnapshot ? '--from' : '--template', body.templateID)
    option('--name', body.name)
    option('--cpus', body.cpuCount)
    option('--memory', body.memoryMB && `${body.memoryMB}MiB`)
    option('--timeout', body.timeout === -1 ? 'none' : body.timeout && `${body.timeout}s`)
    option('--engine', body.engine)
    for (const [key, value] of Object.entries((body.metadata ?? {}) as object)) {
      option('--label', `${key}=${value}`)
    }
    for (const [key, value] of Object.entries((body.envVars ?? {}) as object)) {
      option('--env', `${key}=${value}`)
    }
    const python = [`template=${pythonValue(body.templateID)}`]
    if (body.timeout !== undefined) python.push(`timeout=${pythonValue(body.timeout)}`)
    if (body.metadata) python.push(`metadata=${pythonValue(body.metadata)}`)
    if (body.envVars) python.push(`envs=${pythonValue(body.envVars)}`)
    return {
      jiffy: words,
      python: `sandbox = Sandbox.create(${python.join(', ')})`,
      method: 'POST',
      path: '/v2/sandboxes',
      body,
    }
  },
  pause: (sandbox: string): Command => ({
    jiffy: ['pause', sandbox],
    python: `Sandbox.connect(${pythonString(sandbox)}).pause()`,
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/pause`,
  }),
  resume: (sandbox: string): Command => ({
    jiffy: ['resume', sandbox],
    python: `Sandbox.connect(${pythonString(sandbox)})`,
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/resume`,
    body: {},
  }),
  kill: (sandbox: string): Command => ({
    jiffy: ['kill', sandbox],
    python: `Sandbox.kill(${pythonString(sandbox)})`,
    method: 'DELETE',
    path: `/sandboxes/${id(sandbox)}`,
  }),
  restart: (sandbox: string): Command => ({
    jiffy: ['restart', sandbox],
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/restart`,
  }),
  snapshot: (sandbox: string, name?: string): Command => ({
    jiffy: ['snapshot', sandbox, ...(name ? [`--name=${name}`] : [])],
    python: `Sandbox.connect(${pythonString(sandbox)}).create_snapshot(${name ? `name=${pythonString(name)}` : ''})`,
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/snapshots`,
    body: name ? { name } : {},
  }),
  fork: (sandbox: string, count: number): Command => ({
    jiffy: ['fork', sandbox, '--count', String(count)],
    python: `Sandbox.connect(${pythonString(sandbox)}).fork(count=${count})`,
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/fork`,
    body: { count },
  }),
  promote: (sandbox: string): Command => ({
    jiffy: ['promote', sandbox],
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/promote`,
  }),
  rollback: (sandbox: string, snapshotID: string): Command => ({
    jiffy: ['rollback', sandbox, snapshotID],
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/rollback`,
    body: { snapshotID },
  }),
  timeout: (sandbox: string, seconds: number): Command => ({
    python: `Sandbox.connect(${pythonString(sandbox)}).set_timeout(${seconds})`,
    method: 'POST',
    path: `/sandboxes/${id(sandbox)}/timeout`,
    body: { timeout: seconds },
  }),
  rename: (sandbox: string, name: string): Command => ({
    jiffy: ['rename', '--', sandbox, name],
    method: 'PATCH',
    path: `/sandboxes/${id(sandbox)}`,
    body: { name: name || null },
  }),
  removeSnapshot: (snapshot: string): Command => ({
    jiffy: ['rm', snapshot],
    python: `Sandbox.delete_snapshot(${pythonString(snapshot)})`,
    method: 'DELETE',
    path: `/templates/${id(snapshot)}`,
  }),
  network: (sandbox: string, body: unknown): Command => ({
    method: 'PUT',
    path: `/sandboxes/${id(sandbox)}/network`,
    body,
  }),
}
