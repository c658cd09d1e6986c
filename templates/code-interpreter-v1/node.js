// JavaScript and TypeScript contexts: runs code in the global scope, like a debugger's console. Values and imports persist, `await`
// works at top level, and names may be declared again. Receives requests from the server over a socket. SIGINT interrupts code.
'use strict'

const { createRequire } = require('module')
const path = require('path')
const url = require('url')
const util = require('util')
const vm = require('vm')

function prepareGlobals () {
  const here = () => createRequire(path.join(process.cwd(), 'cell.js'))
  const hidden = (name, value) =>
    Object.defineProperty(globalThis, name, { value, enumerable: false, configurable: true, writable: true })
  hidden('require', here())
  hidden('module', { exports: {} })
  hidden('exports', globalThis.module.exports)
  hidden('__jiffy_import', async name => {
    const text = String(name)
    if (/^(node:|file:|data:)/.test(text)) return import(text)
    if (require('module').builtinModules.includes(text)) return import(text)
    return import(url.pathToFileURL(here().resolve(text)).href)
  })
  hidden('__jiffy_show', value => {
    if (value === undefined) return null
    const bundle = {}
    const display = value && value[Symbol.for('Jupyter.display')]
    if (typeof display === 'function') Object.assign(bundle, display.call(value))
    if (!('text/plain' in bundle)) bundle['text/plain'] = typeof value === 'string' ? value : util.inspect(value)
    return JSON.stringify(bundle)
  })
  hidden('__jiffy_error', error => JSON.stringify(error instanceof Error
    ? { name: String(error.name), value: String(error.message), traceback: String(error.stack) }
    : { name: 'Error', value: typeof error === 'string' ? error : util.inspect(error), traceback: '' }))
  hidden('__jiffy_env', changes => {
    const before = {}
    for (const [key, value] of Object.entries(JSON.parse(changes))) {
      before[key] = Object.prototype.hasOwnProperty.call(process.env, key) ? process.env[key] : null
      if (value === null) delete process.env[key]
      else process.env[key] = value
    }
    return JSON.stringify(before)
  })
  // Clones of a snapshot need new random seeds, and the engine's own generator cannot be reseeded.
  hidden('__jiffy_seed', seed => { state = Uint32Array.from(JSON.parse(seed)) })
  let state = require('crypto').getRandomValues(new Uint32Array(4))
  const next = () => { // xoshiro128**, public domain, by David Blackman and Sebastiano Vigna
    const rotated = (x, k) => (x << k) | (x >>> (32 - k))
    const result = Math.imul(rotated(Math.imul(state[1], 5), 7), 9) >>> 0
    const shifted = state[1] << 9
    state[2] ^= state[0]; state[3] ^= state[1]; state[1] ^= state[2]; state[0] ^= state[3]
    state[2] ^= shifted
    state[3] = rotated(state[3], 11)
    return result
  }
  Math.random = function random () { return ((next() >>> 5) * 67108864 + (next() >>> 6)) / 9007199254740992 }
  // Errors in callbacks that run between executions must not terminate the context.
  process.on('uncaughtException', error => console.error(error))
  process.on('unhandledRejection', error => console.error(error))
}

prepareGlobals()
direct()

function direct () {
  const inspector = require('inspector')
  const net = require('net')
  const { execFile } = require('child_process')
  let acorn = null
  try {
    acorn = require('acorn')
  } catch {
    // Without acorn, code can import modules only with `require`.
  }

  const session = new inspector.Session()
  session.connect()
  const ask = (method, parameters) => new Promise((resolve, reject) =>
    session.post(method, parameters, (error, result) => error ? reject(error) : resolve(result)))
  const server = new net.Socket({ fd: Number(process.argv[2]), readable: true, writable: true })
  const say = message => server.write(JSON.stringify(message) + '\n')

  // Runs `work` synchronously in such a way that SIGINT interrupts even an endless loop.
  const script = new vm.Script('__jiffy_work()')
  const interruptibly = work => {
    let made
    Object.defineProperty(globalThis, '__jiffy_work', { value: () => { made = work() }, configurable: true })
    script.runInThisContext({ breakOnSigint: true })
    return made
  }

  // Calls a function of `prepareGlobals` with a value that only the debugger has a reference to.
  const call = async (name, argument) => {
    const { result } = await ask('Runtime.evaluate', { expression: 'globalThis' })
    const answer = await ask('Runtime.callFunctionOn', {
      functionDeclaration: `function (v) { return globalThis.${name}(v) }`,
      objectId: result.objectId,
      arguments: [argument],
      returnByValue: true
    })
    if (answer.exceptionDetails) throw new Error(`${name} failed`)
    return answer.result.value
  }
  const handle = object => object.objectId
    ? { objectId: object.objectId }
    : 'unserializableValue' in object ? { unserializableValue: object.unserializableValue } : { value: object.value }

  const stripTypes = code => new Promise((resolve, reject) => {
    const options = ['--loader=ts', '--target=esnext', '--log-level=error',
      '--tsconfig-raw={"compilerOptions":{"preserveValueImports":true}}']
    const child = execFile('esbuild', options, { maxBuffer: 64 << 20 }, (error, stdout, stderr) => {
      if (!error) return resolve(stdout)
      const missing = error.code === 'ENOENT'
      reject(missing ? new Error('TypeScript requires esbuild, which is not installed') : new SyntaxError(stderr.trim()))
    })
    child.stdin.on('error', () => {})
    child.stdin.end(code)
  })

  // A script cannot contain import statements: rewrite them to calls of `__jiffy_import`.
  const withImports = code => {
    if (!acorn || !/\b(import|export)\b/.test(code)) return code
    let tree
    try {
      tree = acorn.parse(code, { ecmaVersion: 'latest', sourceType: 'module', allowHashBang: true })
    } catch {
      return code
    }
    const edits = []
    const visit = node => {
      if (!node || typeof node.type !== 'string') return
      const quoted = source => `__jiffy_import(${JSON.stringify(source.value)})`
      if (node.type === 'ImportDeclaration') {
        const all = node.specifiers.find(s => s.type === 'ImportNamespaceSpecifier')
        const named = node.specifiers.filter(s => s !== all).map(s => {
          const imported = s.type === 'ImportDefaultSpecifier' ? 'default' : s.imported.name ?? s.imported.value
          return `${JSON.stringify(imported)}: ${s.local.name}`
        })
        let text = `await ${quoted(node.source)};`
        if (all) text = `var ${all.local.name} = ${text}` + (named.length ? ` var { ${named.join(', ')} } = ${all.local.name};` : '')
        else if (named.length) text = `var { ${named.join(', ')} } = ${text}`
        edits.push([node.start, node.end, text])
        return
      }
      if (node.type === 'ExportNamedDeclaration') {
        edits.push(node.declaration ? [node.start, node.declaration.start, ''] : [node.start, node.end, ''])
      }
      if (node.type === 'ExportDefaultDeclaration') edits.push([node.start, node.declaration.start, ''])
      if (node.type === 'ImportExpression') edits.push([node.start, node.start + 'import'.length, '__jiffy_import'])
      for (const value of Object.values(node)) {
        if (Array.isArray(value)) value.forEach(visit)
        else if (value && typeof value === 'object') visit(value)
      }
    }
    visit(tree)
    edits.sort((a, b) => b[0] - a[0])
    return edits.reduce((text, [from, to, put]) => text.slice(0, from) + put + text.slice(to), code)
  }

  const evaluate = async (code, typescript) => {
    if (typescript) code = await stripTypes(code)
    const expression = withImports(code)
    const answer = await interruptibly(() =>
      ask('Runtime.evaluate', { expression, replMode: true, awaitPromise: true, objectGroup: 'cell' }))
    if (answer.exceptionDetails) {
      const thrown = answer.exceptionDetails.exception
      if (!thrown) return { error: { name: 'Error', value: answer.exceptionDetails.text, traceback: '' } }
      return { error: JSON.parse(await call('__jiffy_error', handle(thrown))) }
    }
    const shown = await call('__jiffy_show', handle(answer.result))
    return { result: shown ? JSON.parse(shown) : null }
  }

  const failed = error => {
    const interrupted = error.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED'
    const [name, value] = interrupted ? ['Interrupted', 'the execution was interrupted'] : [error.name, error.message]
    return { error: { name: String(name ?? 'Error'), value: String(value ?? error), traceback: '' } }
  }
  // Output must be written to the pipes before the reply is sent.
  const flushes = [process.stdout, process.stderr].map(stream => {
    const write = stream.write.bind(stream)
    return () => new Promise(resolve => write('', resolve))
  })
  let stop = () => {}
  process.on('SIGINT', () => stop())

  const execute = async ({ code, env, typescript }) => {
    const interrupted = new Promise((resolve, reject) => {
      stop = () => reject(Object.assign(new Error(), { code: 'ERR_SCRIPT_EXECUTION_INTERRUPTED' }))
    })
    const before = await call('__jiffy_env', { value: JSON.stringify(env) })
    const outcome = await Promise.race([evaluate(code, typescript), interrupted]).catch(failed)
    stop = () => {}
    await Promise.all(flushes.map(flush => flush()))
    await call('__jiffy_env', { value: before })
    await ask('Runtime.releaseObjectGroup', { objectGroup: 'cell' })
    return outcome
  }

  const orders = {
    execute,
    adopt: async ({ changes, seed }) => {
      await call('__jiffy_env', { value: JSON.stringify(changes) })
      if (seed) await call('__jiffy_seed', { value: JSON.stringify(seed) })
    }
  }
  const obey = async order => {
    const outcome = await orders[order.do](order).catch(failed)
    say({ done: order.id, ...outcome })
  }

  let rest = ''
  server.setEncoding('utf8')
  server.on('data', text => {
    const lines = (rest + text).split('\n')
    rest = lines.pop()
    for (const line of lines) obey(JSON.parse(line))
  })
  server.on('close', () => process.exit(0))
  ask('Runtime.enable').then(() => say({ done: 0 }))
}
