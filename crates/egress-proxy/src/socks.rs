//! Client of SOCKS5 (RFC 1928) with user name and password (RFC 1929). Each answer is read to its
//! exact length, because the bytes after it belong to the connection to the server.
//!
//! A sandbox can have a proxy through which all its TCP connections leave. This client connects to
//! that proxy.

use crate::proxy_credentials::{MAX_CREDENTIAL, ProxyCredentials};
use jiffy_network::EgressTarget;
use std::io;
use std::net::SocketAddr;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use zeroize::Zeroizing;

const VERSION: u8 = 5;
const CONNECT: u8 = 1;
/// Authentication methods.
const NO_AUTHENTICATION: u8 = 0;
const USERNAME_PASSWORD: u8 = 2;
/// Version of the messages with user name and password.
const PASSWORD_VERSION: u8 = 1;
/// Types of addresses.
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;
/// Maximum length of a name in bytes.
const MAX_NAME: usize = 255;

/// Failure of a proxy to connect to a server.
#[derive(Debug, thiserror::Error)]
pub enum SocksError {
    /// The proxy closed the connection, or it failed.
    #[error("the connection to the proxy failed: {0}")]
    Io(#[from] io::Error),
    /// The peer is not a SOCKS5 proxy.
    #[error("the peer is not a SOCKS5 proxy: it sent {0:#04x}")]
    Protocol(u8),
    /// The proxy requires another authentication method.
    #[error("the proxy rejected the authentication method; set or remove user name and password")]
    Method,
    /// The proxy rejected user name and password.
    #[error("the proxy rejected user name and password")]
    Credentials,
    /// The proxy did not connect to the server.
    #[error("the proxy did not connect: {}", reply_text(*.0))]
    Reply(u8),
    /// A user name, a password or a host name is empty or too long.
    #[error("user name, password or host name is empty or longer than 255 bytes")]
    Length,
}

/// Returns the meaning of a reply (RFC 1928, 6).
fn reply_text(code: u8) -> &'static str {
    match code {
        1 => "general failure",
        2 => "its rules do not allow the connection",
        3 => "network unreachable",
        4 => "host unreachable",
        5 => "connection refused",
        6 => "TTL expired",
        7 => "it does not support connections",
        8 => "it does not support this kind of address",
        _ => "unknown reply",
    }
}

/// Appends `text` with its length.
fn push_text(message: &mut Vec<u8>, text: &[u8], max: usize) -> Result<(), SocksError> {
    let length = u8::try_from(text.len())
        .ok()
        .filter(|_| (1..=max).contains(&text.len()));
    message.push(length.ok_or(SocksError::Length)?);
    message.extend(text);
    Ok(())
}

/// Sends a message completely. With TLS, unflushed bytes would remain in the buffer.
async fn send<S: AsyncWrite + Unpin>(proxy: &mut S, message: &[u8]) -> io::Result<()> {
    proxy.write_all(message).await?;
    proxy.flush().await
}

/// Requests a connection to `target` on a new connection to a proxy. On success, the following
/// bytes of `proxy` belong to the connection to `target`.
pub(crate) async fn connect<S: AsyncRead + AsyncWrite + Unpin>(
    proxy: &mut S,
    credentials: Option<&ProxyCredentials>,
    target: EgressTarget<'_>,
) -> Result<(), SocksError> {
    let request = request(target)?;
    // With credentials, only this method is offered: a proxy that also accepts connections without
    // a user might apply other rules to them.
    let method = credentials.map_or(NO_AUTHENTICATION, |_| USERNAME_PASSWORD);
    send(proxy, &[VERSION, 1, method]).await?;
    let mut answer = [0; 2];
    proxy.read_exact(&mut answer).await?;
    match answer {
        [VERSION, chosen] if chosen == method => {}
        [VERSION, _] => return Err(SocksError::Method),
        [other, _] => return Err(SocksError::Protocol(other)),
    }
    if let Some(credentials) = credentials {
        authenticate(proxy, credentials).await?;
    }
    send(proxy, &request).await?;
    read_reply(proxy).await
}

/// Authenticates with user name and password (RFC 1929).
async fn authenticate<S: AsyncRead + AsyncWrite + Unpin>(
    proxy: &mut S,
    credentials: &ProxyCredentials,
) -> Result<(), SocksError> {
    // Allocated at its maximum size, so that no copy of the password remains after a growth.
    let mut message = Zeroizing::new(Vec::with_capacity(3 + 2 * MAX_CREDENTIAL));
    message.push(PASSWORD_VERSION);
    push_text(
        &mut message,
        credentials.username.as_bytes(),
        MAX_CREDENTIAL,
    )?;
    push_text(
        &mut message,
        credentials.password.as_bytes(),
        MAX_CREDENTIAL,
    )?;
    send(proxy, &message).await?;
    let mut answer = [0; 2];
    proxy.read_exact(&mut answer).await?;
    match answer {
        [PASSWORD_VERSION, 0] => Ok(()),
        [PASSWORD_VERSION, _] => Err(SocksError::Credentials),
        [other, _] => Err(SocksError::Protocol(other)),
    }
}

/// Returns the request to connect to `target` (RFC 1928, section 4).
fn request(target: EgressTarget<'_>) -> Result<Vec<u8>, SocksError> {
    let mut message = vec![VERSION, CONNECT, 0];
    let port = match target {
        EgressTarget::Name(name, port) => {
            message.push(NAME);
            push_text(&mut message, name.as_bytes(), MAX_NAME)?;
            port
        }
        EgressTarget::Address(SocketAddr::V4(address)) => {
            message.push(IPV4);
            message.extend(address.ip().octets());
            address.port()
        }
        EgressTarget::Address(SocketAddr::V6(address)) => {
            message.push(IPV6);
            message.extend(address.ip().octets());
            address.port()
        }
    };
    message.extend(port.to_be_bytes());
    Ok(message)
}

/// Reads the reply with the address from which the proxy connected, which is ignored.
async fn read_reply<S: AsyncRead + Unpin>(proxy: &mut S) -> Result<(), SocksError> {
    let mut head = [0; 4];
    proxy.read_exact(&mut head).await?;
    let [version, code, _, kind] = head;
    if version != VERSION {
        return Err(SocksError::Protocol(version));
    }
    if code != 0 {
        return Err(SocksError::Reply(code));
    }
    let length = match kind {
        IPV4 => 4,
        IPV6 => 16,
        NAME => usize::from(proxy.read_u8().await?),
        other => return Err(SocksError::Protocol(other)),
    };
    let mut rest = [0; MAX_NAME + 2];
    let rest = rest.get_mut(..length + 2).ok_or(SocksError::Length)?;
    proxy.read_exact(rest).await?;
    Ok(())
}

#[cfg(test)]
#[path = "socks_tests.rs"]
mod tests;
