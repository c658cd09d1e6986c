// Templates.
import * as e2b from 'e2b'
import { withAddress } from './connection.js'

/** Templates: `Template` of `e2b`, whose calls find the daemon as `Sandbox` does. */
export const Template: typeof e2b.Template = new Proxy(e2b.Template, {
  get(target, name, receiver) {
    const value: unknown = Reflect.get(target, name, receiver)
    if (typeof value !== 'function' || !Object.hasOwn(CALLS, name)) return value
    const bound = new e2b.E2B(withAddress({})).Template
    return (Reflect.get(bound, name) as (...args: unknown[]) => unknown).bind(bound)
  },
})

// Functions of `Template` that send requests.
const CALLS = {
  build: true,
  buildInBackground: true,
  getBuildStatus: true,
  exists: true,
  aliasExists: true,
  assignTags: true,
  removeTags: true,
  getTags: true,
}
