// Code runs in contexts that preserve state.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { Sandbox } from '@e2b/code-interpreter'
import { create, Collected, limit, unique } from './support.js'

let sandbox
after(() => sandbox?.kill())
before(async () => {
  sandbox = await create(null, 'code-interpreter-v1', {}, Sandbox)
})

test('results, output and errors are streamed', limit, async () => {
  const events = []
  const code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\ndisplay('shown')\n6 * 7"
  const execution = await sandbox.runCode(code, {
    onStdout: (message) => events.push(`stdout ${message.line.trim()}`),
    onStderr: (message) => events.push(`stderr ${message.line.trim()}`),
    onResult: (result) => events.push(`result ${result.text}`),
  })
  assert.deepEqual(events.toSorted(), ['result 42', 'result shown', 'stderr err', 'stdout out'])
  assert.equal(execution.text, '42')
  assert.equal(execution.error, undefined)
  const failed = await sandbox.runCode("raise ValueError('broken on purpose')")
  assert.deepEqual([failed.error.name, failed.error.value], ['ValueError', 'broken on purpose'])
  assert.match(failed.error.traceback, /ValueError/)
})

test('contexts preserve state, are independent, and can be restarted and removed', limit, async () => {
  const first = await sandbox.createCodeContext()
  const second = await sandbox.createCodeContext({ cwd: '/tmp' })
  await sandbox.runCode("mine = 'first'", { context: first })
  assert.equal((await sandbox.runCode('mine', { context: first })).text, 'first')
  assert.equal((await sandbox.runCode('mine', { context: second })).error.name, 'NameError')
  assert.equal((await sandbox.runCode('import os; os.getcwd()', { context: second })).text, '/tmp')
  const ids = async () => (await sandbox.listCodeContexts()).map((context) => context.id)
  assert.ok((await ids()).includes(first.id) && (await ids()).includes(second.id))
  await sandbox.restartCodeContext(first)
  assert.equal((await sandbox.runCode('mine', { context: first })).error.name, 'NameError')
  await sandbox.removeCodeContext(first)
  await sandbox.removeCodeContext(second.id)
  assert.ok(!(await ids()).includes(first.id) && !(await ids()).includes(second.id))
  await assert.rejects(sandbox.runCode('1', { context: first }))
})

for (const [language, code, then, answer] of [
  ['bash', 'X=shell; cd /tmp', 'echo $X:$PWD', 'shell:/tmp\n'],
  ['javascript', 'const x = [1, 2, 3]', 'console.log(x.map(n => n * 2).join())', '2,4,6\n'],
  ['typescript', 'const t: number = 5', 'console.log((t as number) + 1)', '6\n'],
]) {
  test(`${language} preserves state`, limit, async () => {
    const first = await sandbox.runCode(code, { language })
    assert.equal(first.error, undefined)
    const second = await sandbox.runCode(then, { language })
    assert.equal(second.error, undefined)
    assert.equal(second.logs.stdout.join(''), answer)
  })
}

test('a picture is returned as png and as data', limit, async () => {
  const code = `import matplotlib.pyplot as plt
plt.figure()
plt.bar(['a', 'b'], [3, 5])
plt.title('Two bars'); plt.xlabel('which'); plt.ylabel('how much')
plt.show()`
  const execution = await sandbox.runCode(code)
  assert.equal(execution.error, undefined)
  const [picture] = execution.results.filter((result) => result.png)
  assert.equal(Buffer.from(picture.png, 'base64').subarray(0, 8).toString('hex'), '89504e470d0a1a0a')
  assert.deepEqual([picture.chart.type, picture.chart.title, picture.chart.x_label], ['bar', 'Two bars', 'which'])
  assert.deepEqual(picture.chart.elements.map((bar) => Number(bar.value)), [3, 5])
})

test('tables are returned as html, values as json', limit, async () => {
  const { results } = await sandbox.runCode("import pandas as pd\nfrom IPython.display import JSON\ndisplay(JSON({'k': [1, None]}))\npd.DataFrame({'a': [1, 2]})")
  assert.deepEqual(results[0].json, { k: [1, null] })
  assert.match(results[1].html, /<table/)
  assert.equal(results[1].isMainResult, true)
})

test('timed out code is interrupted and its context continues', limit, async () => {
  const context = await sandbox.createCodeContext()
  await sandbox.runCode('kept = 1', { context })
  await assert.rejects(sandbox.runCode('import time\nwhile True: time.sleep(0.05)', { context, timeoutMs: 1000 }), /[Tt]imeout/)
  assert.equal((await sandbox.runCode('kept + 1', { context, timeoutMs: 20_000 })).text, '2')
  await sandbox.removeCodeContext(context)
})

test('variables of one execution are removed afterwards', limit, async () => {
  const name = `V_${unique()}`
  const code = `import os; os.environ.get('${name}')`
  assert.equal((await sandbox.runCode(code, { envs: { [name]: 'here' } })).text, 'here')
  assert.equal((await sandbox.runCode(code)).text, undefined)
})

test('memory of code survives a pause', limit, async (t) => {
  const sleeper = await create(t, 'code-interpreter-v1', {}, Sandbox)
  await sleeper.runCode('number = 41')
  await sleeper.pause()
  await sleeper.connect()
  const heard = new Collected()
  const execution = await sleeper.runCode('number += 1; print(number); number', { onStdout: (message) => heard.push(message.line) })
  assert.equal(execution.text, '42')
  assert.equal(heard.text, '42\n')
})
