// "As a command": the three forms of each action have the same result as the call of its button,
// also with hostile names and values.
import assert from 'node:assert/strict'
import { spawn, spawnSync } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { createRequire } from 'node:module'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { createInterface } from 'node:readline'
import { after, before, test } from 'node:test'
import { pathToFileURL } from 'node:url'
import { ADMIN_KEY, API, createSandbox, owner } from './browser.mjs'
import { moduleOf } from './wasm.mjs'

const web = new URL('../../web/', import.meta.url)
const typescript = createRequire(new URL('package.json', web))('typescript')
const HOSTILE = `it's "$(touch /tmp/hacked)" \`id\` \\ <b>é\u{1F600}\u202e;&|*?~#!%`
const { E2B_PYTHON, JIFFY_BIN_DIR, JIFFY_HOME } = process.env
const environment = {
  ...process.env,
  PATH: `${JIFFY_BIN_DIR}:${process.env.PATH}`,
  JIFFY_URL: API,
  JIFFY_API_KEY: ADMIN_KEY,
  E2B_API_URL: API,
  E2B_API_KEY: ADMIN_KEY,
}

let directory
let python
let forms
before(async () => {
  directory = mkdtempSync(join(tmpdir(), 'jiffy-commands.'))
  const names = ['command-text', 'commands', 'key-commands', 'function-commands', 'template-commands']
  for (const name of names) {
    const source = readFileSync(new URL(`src/lib/${name}.ts`, web), 'utf8')
    const options = { compilerOptions: { module: 'esnext', target: 'es2023' } }
    const text = typescript.transpileModule(source, options).outputText
    writeFileSync(join(directory, `${name}.mjs`), text.replace(/from '(\.\/[a-z-]+)'/g, "from '$1.mjs'"))
  }
  const load = (name) => import(pathToFileURL(join(directory, `${name}.mjs`)))
  const modules = await Promise.all(names.map(load))
  forms = Object.assign({}, ...modules)
  if (E2B_PYTHON) python = startPython()
})
after(() => {
  python?.stop()
  rmSync(directory, { recursive: true })
})

/** Starts an interpreter that runs programs one after another: the import of `e2b` takes a second. */
function startPython() {
  const loop =
    'import json, sys, traceback\n' +
    'for line in sys.stdin:\n' +
    '    try:\n' +
    '        exec(json.loads(line), {})\n' +
    '        print(json.dumps(None), flush=True)\n' +
    '    except BaseException:\n' +
    '        print(json.dumps(traceback.format_exc()), flush=True)\n'
  const process = spawn(E2B_PYTHON, ['-c', loop], {
    env: environment,
    cwd: directory,
    stdio: ['pipe', 'pipe', 'inherit'],
  })
  const answers = createInterface({ input: process.stdout })[Symbol.asyncIterator]()
  return {
    async run(program) {
      process.stdin.write(`${JSON.stringify(program)}\n`)
      // A program may print lines of its own.
      for (;;) {
        const { value, done } = await answers.next()
        if (done) throw new Error('python exited')
        const answer = /^(null|")/.test(value) ? JSON.parse(value) : undefined
        if (answer === null) return
        if (typeof answer === 'string' && answer.startsWith('Traceback')) throw new Error(`${answer}\n${program}`)
      }
    },
    stop: () => process.kill(),
  }
}

function shell(line) {
  const { status, stderr } = spawnSync('bash', ['-c', line], { env: environment, encoding: 'utf8', cwd: directory })
  if (status !== 0) throw new Error(`${line}\n${stderr}`)
}

/** Makes the call that the button of the action makes. */
async function press(command) {
  const headers = { 'x-api-key': ADMIN_KEY }
  let body
  if (command.body !== undefined) {
    headers['content-type'] = 'application/json'
    body = JSON.stringify(command.body)
  } else if (command.text !== undefined) {
    headers['content-type'] = 'text/plain'
    body = command.text
  } else if (command.form) {
    body = new FormData()
    body.set('settings', JSON.stringify(command.form.settings))
    body.set('module', new Blob([readFileSync(join(directory, command.form.file))]))
  }
  const response = await fetch(API + command.path, { method: command.method, headers, body })
  if (!response.ok) throw new Error(`${command.method} ${command.path}: ${response.status} ${await response.text()}`)
}

/** Returns the forms of a command, by name. */
function runners(command) {
  const found = { curl: () => shell(forms.curlLine(command)) }
  if (command.jiffy) found.jiffy = () => shell(forms.jiffyLine(command))
  if (python) found.python = () => python.run(forms.pythonLines([command]))
  return found
}

/**
 * Compares the result of the button with that of each form. `prepare` returns the argument of `command`
 * and `observe`. `observe` returns the result without ids and times.
 */
async function compare(prepare, command, observe) {
  const first = await prepare()
  const pressed = command(first)
  await press(pressed)
  const expected = await observe(first)
  for (const name of Object.keys(runners(pressed))) {
    const state = await prepare()
    await runners(command(state))[name]()
    assert.deepEqual(await observe(state), expected, `${name} of ${pressed.method} ${pressed.path}`)
  }
}

const detail = (id) => owner('GET', `/sandboxes/${id}`)
const list = () => owner('GET', '/v2/sandboxes?limit=100&state=running,paused')
const killAll = async () => {
  for (const s of await list()) await owner('DELETE', `/sandboxes/${s.sandboxID}`)
}

test('a sandbox is created with hostile metadata and environment', async () => {
  const body = { templateID: 'base', timeout: 900, metadata: { [`k ${HOSTILE}`]: HOSTILE }, envVars: { A: HOSTILE } }
  const named = { ...body, name: 'n', cpuCount: 1, memoryMB: 256, idleTimeout: 600 }
  const paused = { ...body, idleTimeout: 0, lifecycle: { onTimeout: 'pause', autoResume: true } }
  for (const settings of [body, named, paused, { ...body, allow_internet_access: false }]) {
    await compare(
      killAll,
      () => forms.commands.create(settings),
      async () => {
        const sandboxes = await list()
        assert.equal(sandboxes.length, 1)
        const { name, cpuCount, memoryMB, metadata, jiffy } = sandboxes[0]
        const { timeout_s, on_timeout, idle_timeout_s, network } = jiffy.terms
        const env = (await detail(sandboxes[0].sandboxID)).jiffy.env
        return {
          name,
          cpuCount,
          memoryMB,
          metadata,
          env,
          timeout_s,
          on_timeout,
          idle_timeout_s,
          internet: network.allow_internet_access,
        }
      },
    )
  }
  await killAll()
})

test('the state, name, timeout, rules and copies of a sandbox change alike', async () => {
  const { sandboxID: id } = await createSandbox({ name: 'first' })
  const state = async () => (await detail(id)).state
  await compare(
    async () => {
      if ((await state()) === 'paused') await owner('POST', `/sandboxes/${id}/resume`, {})
    },
    () => forms.commands.pause(id),
    state,
  )
  await compare(
    async () => {
      if ((await state()) === 'running') await owner('POST', `/sandboxes/${id}/pause`)
    },
    () => forms.commands.resume(id),
    state,
  )
  await compare(
    () => owner('PATCH', `/sandboxes/${id}`, { name: 'first' }),
    () => forms.commands.rename(id, '-rf'.slice(1)),
    async () => (await detail(id)).name,
  )
  await compare(
    () => owner('POST', `/sandboxes/${id}/timeout`, { timeout: 60 }),
    () => forms.commands.timeout(id, { timeout: 3600 }),
    async () => Math.round(((await detail(id)).jiffy.deadline_ms - Date.now()) / 300_000),
  )
  for (const timeouts of [{ idleTimeout: 600 }, { timeout: -1, idleTimeout: 900 }, { timeout: 7200, idleTimeout: 0 }]) {
    await compare(
      () => owner('POST', `/sandboxes/${id}/timeout`, { timeout: 1800, idleTimeout: 300 }),
      () => forms.commands.timeout(id, timeouts),
      async () => {
        const { deadline_ms, terms } = (await detail(id)).jiffy
        const left = deadline_ms && Math.round((deadline_ms - Date.now()) / 300_000)
        return [left, terms.idle_timeout_s]
      },
    )
  }
  const headers = { 'a.example': [{ transform: { headers: { 'x-key': 'value' } } }] }
  const rules = { allowOut: ['example.com', '1.2.3.0/24'], denyOut: ['0.0.0.0/0'] }
  await compare(
    // The form of the console does not contain the last rules, which remain.
    () => owner('PUT', `/sandboxes/${id}/network`, { egressMbps: 50, rules: headers }),
    () => forms.commands.network(id, rules),
    async () => {
      const { network } = await detail(id)
      assert.deepEqual([network.egressMbps, Object.keys(network.rules)], [50, ['a.example']])
      return network
    },
  )
  const snapshots = async () => (await owner('GET', `/snapshots?limit=100`)).filter((s) => s.purpose === 'asked')
  const clear = async () => {
    for (const s of await snapshots()) await owner('DELETE', `/templates/${s.snapshotID}`)
  }
  const names = async () => (await snapshots()).map((s) => s.jiffy.name)
  await compare(clear, () => forms.commands.snapshot(id, 'safe.1'), names)
  const [{ snapshotID }] = await snapshots()
  await compare(
    () => owner('PATCH', `/sandboxes/${id}`, { name: 'changed' }),
    () => forms.commands.rollback(id, snapshotID),
    async () => (await detail(id)).snapshotID,
  )
  await compare(
    async () => {
      await clear()
      return (await owner('POST', `/sandboxes/${id}/snapshots`, {})).snapshotID
    },
    (snapshot) => forms.commands.removeSnapshot(snapshot),
    names,
  )
  const forks = async () => (await list()).filter((s) => s.forkedFrom === id)
  const killForks = async () => {
    for (const fork of await forks()) await owner('DELETE', `/sandboxes/${fork.sandboxID}`)
  }
  await compare(
    killForks,
    () => forms.commands.fork(id, 2),
    async () => (await forks()).length,
  )
  await compare(
    async () => {
      await killForks()
      return (await owner('POST', `/sandboxes/${id}/fork`, { count: 2 }))[0].sandbox.sandboxID
    },
    (fork) => forms.commands.promote(fork),
    async (fork) => (await forks()).map((s) => s.sandboxID === fork),
  )
  await compare(
    async () => (await createSandbox({})).sandboxID,
    (sandbox) => forms.commands.kill(sandbox),
    async (sandbox) => (await detail(sandbox)).state,
  )
  await killAll()
})

test('keys are created, rotated and revoked alike, with a hostile name', async () => {
  // The command line changes the keys of the host on which it runs.
  assert.ok(JIFFY_HOME, 'the directory of the daemon')
  const find = async () => (await owner('GET', '/keys')).filter((k) => k.name === HOSTILE.replace('\u202e', ''))
  const name = HOSTILE.replace('\u202e', '')
  const expiresAt = '2099-01-02T03:04:05Z'
  const body = { name, scope: 'create', limits: { sandboxes: 2, memoryMB: 512 }, expiresAt, addresses: ['10.0.0.0/8'] }
  const seen = async (key) => {
    const { scope, limits, addresses, expiresAt: expiry } = key
    return { scope, limits, addresses, expiry, isRevoked: key.revokedAt != null }
  }
  await compare(
    () => {},
    () => forms.keyCommands.create(body),
    async () => seen((await find()).at(-1)),
  )
  const create = async () => (await owner('POST', '/keys', body)).key.keyID
  const one = async (id) => seen((await owner('GET', '/keys')).find((k) => k.keyID === id))
  await compare(create, (id) => forms.keyCommands.rotate(id, { overlapMs: 3_600_000 }), one)
  await compare(create, (id) => forms.keyCommands.revoke(id, true), one)
})

test('templates are built, published and tagged alike, with hostile commands', async () => {
  const name = 'built'
  const find = async () => (await owner('GET', '/templates')).find((t) => t.names.includes(name))
  const remove = async () => {
    if (await find()) await owner('DELETE', `/templates/${name}`)
  }
  const line = `printf %s '${HOSTILE.replaceAll("'", '').replace('touch', 'true')}' > /built`
  const steps = [{ type: 'RUN', args: [line, 'root'] }]
  const body = { fromTemplate: 'base', steps }
  const build = forms.templateCommands.build({ name, fromTemplate: 'base', commands: [line] }, body)
  const ready = async () => {
    for (;;) {
      const template = await find()
      const id = template?.buildID
      const status = id && (await owner('GET', `/templates/${name}/builds/${id}/status`))
      if (status && !['waiting', 'building'].includes(status.status)) return status.status
      await new Promise((resolve) => setTimeout(resolve, 100))
    }
  }
  // The button makes two calls.
  for (const [form, run] of Object.entries(runners(build))) {
    await remove()
    await run()
    assert.equal(await ready(), 'ready', form)
    assert.equal((await find()).buildCount, 1, form)
  }
  const id = (await find()).templateID
  const { publish, addTag, removeTag, remove: removal } = forms.templateCommands
  await compare(
    () => owner('PATCH', `/v2/templates/${id}`, { public: false }),
    () => publish(id, name, true),
    async () => (await find()).public,
  )
  const tags = async () => (await owner('GET', `/templates/${id}/tags`)).map((t) => t.tag).sort()
  const untag = async () => {
    if ((await tags()).includes('t-1')) await owner('DELETE', '/templates/tags', { name, tags: ['t-1'] })
  }
  await compare(untag, () => addTag(name, 't-1'), tags)
  await compare(
    async () => {
      await untag()
      await owner('POST', '/templates/tags', { target: name, tags: ['t-1'] })
    },
    () => removeTag(name, 't-1'),
    tags,
  )
  shell(forms.jiffyLine(removal(id, name)))
  assert.equal(await find(), undefined)
  // The template is up to date, so that no packages are installed.
  const state = async () => (await owner('GET', '/recipes')).find((recipe) => recipe.name === 'base').state
  const idle = async () => {
    while ((await state()) === 'building') await new Promise((resolve) => setTimeout(resolve, 50))
  }
  await compare(
    idle,
    () => forms.templateCommands.recipe('base'),
    async () => {
      await idle()
      return state()
    },
  )
})

test('functions are deployed and changed alike, with hostile values', async () => {
  const file = `-m'"\\ é.wasm`
  writeFileSync(join(directory, file), moduleOf('answer'))
  const all = () => owner('GET', '/functions')
  const clear = async () => {
    for (const f of await all()) await owner('DELETE', `/functions/${f.name}`)
  }
  const seen = async () =>
    (await all()).map(({ name, envNames, limits, allow, state, version, ...f }) => {
      return { name, envNames, limits, allow, state, version, isPublic: f.public, cron: f.schedule?.cron }
    })
  const settings = {
    public: true,
    env: { A: HOSTILE },
    allow: ['example.com'],
    schedule: '*/5 * * * *',
    limits: { memoryMB: 64, cpuMs: 20, timeoutMs: 2000, concurrency: 3 },
  }
  const { deploy, disable, enable, rollBack, remove } = forms.functionCommands
  const install = async () => {
    await clear()
    await press(deploy('fn', {}, file))
    await press(deploy('fn', {}, file))
  }
  await compare(clear, () => deploy('fn', settings, file), seen)
  await compare(install, () => disable('fn'), seen)
  await compare(
    async () => {
      await install()
      await press(disable('fn'))
    },
    () => enable('fn'),
    seen,
  )
  await compare(install, () => rollBack('fn', 1), seen)
  await compare(install, () => remove('fn'), seen)
})
