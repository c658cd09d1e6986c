// SDK of Jiffy: sandboxes with snapshots, forks and rollback. The classes derive from the classes
// of the package `e2b`: code for `e2b` works after its import is changed.
export * from 'e2b'
export * as errors from './errorCodes.js'
export {
  AllFailedError,
  type ApiError,
  type ApiErrorDetails,
  NoDaemonError,
  UnreachableError,
  isApiError,
} from './errors.js'
export type { InvokeOptions, SnapshotOptions } from './calls.js'
export type * from './models.js'
export type { SandboxOptions } from './options.js'
export { Function, Host, Snapshot } from './resources.js'
export {
  type Compared,
  type DiffOptions,
  type Progress,
  Sandbox,
  type TryOptions,
  Sandbox as default,
} from './sandbox.js'
export { Template } from './template.js'
export { Volume } from './volume.js'
