// Runs the scenarios: run.js REPORT [NAME...].
import './base.js'
import './copies.js'
import './failures.js'
import './operation.js'
import { runAll } from './harness.js'
import { removeShared } from './servers.js'

const [report, ...names] = process.argv.slice(2)
process.exit((await runAll(report, names, removeShared)) > 0 ? 1 : 0)
