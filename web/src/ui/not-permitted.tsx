import { useSession } from '../session'
import { visible } from '../lib/visible'
import { Empty } from './controls'

/** Explains why a page has no content for the key of the session. */
export function NotPermitted({ what, scope }: { what: string; scope: 'admin' | 'create' }) {
  const session = useSession()
  return (
    <Empty title="Not permitted with this key" command={`jiffy key create --scope ${scope}`}>
      <p>
        {what} visible to keys of scope <code>{scope}</code>
        {scope === 'create' && (
          <>
            {' '}
            or <code>admin</code>
          </>
        )}
        . The key {visible(session.keyName ?? '')} has scope <code>{session.scope}</code>.
      </p>
    </Empty>
  )
}
