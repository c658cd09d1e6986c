//! Passwords for registries of clouds: `GetAuthorizationToken` of Amazon ECR, signed with AWS
//! Signature Version 4, and access tokens of Google for a service account (RFC 7523).

use super::super::responses::{fault_of, read_body};
use super::super::url::RequestUrl;
use super::RegistryClient;
use crate::error::PullFault;
use crate::login::{Credentials, RegistryLogin};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use bytes::Bytes;
use hyper::{Method, StatusCode};
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use ring::{digest, hmac};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use std::fmt::Write as _;
use std::time::{SystemTime, UNIX_EPOCH};

/// Maximum length of a response in bytes.
const MAX_RESPONSE: usize = 64 << 10;
/// Maximum length of the key file of a service account in bytes.
const MAX_KEY_FILE: usize = 16 << 10;
/// Operation of the API of Amazon ECR.
const AWS_TARGET: &str = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken";
/// Media type of the API of Amazon ECR.
const AWS_CONTENT_TYPE: &str = "application/x-amz-json-1.1";
/// Access right to read images.
const GOOGLE_SCOPE: &str = "https://www.googleapis.com/auth/cloud-platform";
/// User name for access tokens of Google.
const GOOGLE_USER: &str = "oauth2accesstoken";
/// Validity of an assertion in seconds, the maximum that Google accepts.
const ASSERTION_S: u64 = 3600;

/// Response of `GetAuthorizationToken`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AwsTokens {
    authorization_data: Vec<AwsToken>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AwsToken {
    authorization_token: String,
}

/// Key file of a service account.
#[derive(Deserialize)]
struct ServiceAccount {
    client_email: String,
    private_key: String,
    #[serde(default)]
    private_key_id: String,
    token_uri: String,
}

/// Response of a token server of Google.
#[derive(Deserialize)]
struct GoogleToken {
    access_token: String,
}

/// A request with a body.
struct TokenRequest<'a> {
    url: RequestUrl,
    headers: Vec<(&'static str, String)>,
    body: String,
    /// Name of the server for errors.
    server: &'a str,
}

impl RegistryClient {
    /// Returns user and password for the registry.
    pub(super) async fn password(
        &mut self,
        login: &RegistryLogin,
    ) -> Result<Credentials, PullFault> {
        match login {
            RegistryLogin::Password(credentials) => Ok(credentials.clone()),
            RegistryLogin::Aws {
                access_key_id,
                secret_access_key,
                region,
                endpoint,
            } => {
                let key = (access_key_id.as_str(), secret_access_key.as_str());
                self.aws_password(key, region, endpoint).await
            }
            RegistryLogin::Gcp { service_account } => self.google_password(service_account).await,
        }
    }

    /// Requests a password for a registry of Amazon ECR with an access key (id and secret). The
    /// token in the response is `USER:PASSWORD` in base64.
    async fn aws_password(
        &mut self,
        key: (&str, &str),
        region: &str,
        endpoint: &str,
    ) -> Result<Credentials, PullFault> {
        let url = RequestUrl::parse(&format!("{}/", endpoint.trim_end_matches('/')))?;
        let body = "{}".to_owned();
        let time = aws_time(now());
        let headers = [
            ("content-type", AWS_CONTENT_TYPE.to_owned()),
            ("host", url.origin.authority()),
            ("x-amz-date", time),
            ("x-amz-target", AWS_TARGET.to_owned()),
        ];
        let authorization = aws_signature(key, region, &url.target, &headers, &body);
        let mut headers: Vec<_> = headers
            .into_iter()
            .filter(|(name, _)| *name != "host")
            .collect();
        headers.push(("authorization", authorization));
        let request = TokenRequest {
            url,
            headers,
            body,
            server: "Amazon ECR",
        };
        let tokens: AwsTokens = self.token(request).await?;
        let token = tokens.authorization_data.first();
        let decoded = token.and_then(|t| STANDARD.decode(&t.authorization_token).ok());
        let text = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
        let pair = text.as_deref().and_then(|text| text.split_once(':'));
        let (user, password) = pair.ok_or_else(|| malformed("Amazon ECR"))?;
        Ok(Credentials {
            user: user.to_owned(),
            password: password.to_owned(),
        })
    }

    async fn google_password(&mut self, key_file: &str) -> Result<Credentials, PullFault> {
        let refused = |problem: &str| PullFault::Refused(problem.to_owned());
        let account: Option<ServiceAccount> = (key_file.len() <= MAX_KEY_FILE)
            .then(|| serde_json::from_str(key_file).ok())
            .flatten();
        let account = account
            .ok_or_else(|| refused("the credentials are not the key file of a service account"))?;
        let url = RequestUrl::parse(&account.token_uri)?;
        let assertion = assertion(&account, now())
            .ok_or_else(|| refused("the key file has no valid RSA key"))?;
        let grant = "urn%3Aietf%3Aparams%3Aoauth%3Agrant-type%3Ajwt-bearer";
        let content_type = "application/x-www-form-urlencoded".to_owned();
        let request = TokenRequest {
            url,
            headers: vec![("content-type", content_type)],
            // An assertion consists of characters that need no escapes.
            body: format!("grant_type={grant}&assertion={assertion}"),
            server: "Google",
        };
        let token: GoogleToken = self.token(request).await?;
        Ok(Credentials {
            user: GOOGLE_USER.to_owned(),
            password: token.access_token,
        })
    }

    /// Sends a request for a token, without redirects.
    async fn token<T: DeserializeOwned>(
        &mut self,
        request: TokenRequest<'_>,
    ) -> Result<T, PullFault> {
        let TokenRequest {
            url,
            headers,
            body,
            server,
        } = request;
        if !url.origin.tls && !self.permits_plain_http(&url.origin) {
            return Err(PullFault::Refused(format!(
                "the token server {} has no TLS",
                url.origin.authority()
            )));
        }
        let sent = self.send(&Method::POST, &url, &headers, Bytes::from(body));
        let response = sent.await?;
        match response.status() {
            status if status.is_success() => {}
            // Amazon and Google report invalid keys and signatures by these statuses.
            StatusCode::BAD_REQUEST | StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                return Err(PullFault::Unauthorized);
            }
            _ => return Err(fault_of(response).await),
        }
        let body = read_body(response, MAX_RESPONSE).await?;
        serde_json::from_slice(&body).map_err(|_| malformed(server))
    }
}

fn malformed(server: &str) -> PullFault {
    PullFault::Refused(format!("the token of {server} is malformed"))
}

/// Returns the seconds since 1970.
fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs()
}

/// Returns a time in the form `20261130T091500Z`.
fn aws_time(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Conversion of days since 1970 to a date of the Gregorian calendar, by eras of 400 years that
    // begin in March. Years begin in March as well, so that a leap day is the last day of a year.
    // 719,468 days are the time from 1 March of the year 0 until 1970. An era has 146,097 days,
    // 100 years have 36,524 days, and 4 years have 1460 days without the leap day.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let leap_days = day_of_era / 1460 + day_of_era / 146_096;
    let year_of_era = (day_of_era + day_of_era / 36_524 - leap_days) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Five months from March or August have 153 days.
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!(
        "{year:04}{month:02}{day:02}T{:02}{:02}{:02}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

/// Returns the `Authorization` header of a `POST` request by Signature Version 4. `headers` are the
/// signed headers in alphabetical order, with `x-amz-date`.
fn aws_signature(
    (id, secret): (&str, &str),
    region: &str,
    path: &str,
    headers: &[(&str, String)],
    body: &str,
) -> String {
    let mut canonical = format!("POST\n{path}\n\n");
    let mut names = Vec::new();
    let mut time = "";
    for (name, value) in headers {
        canonical.push_str(&format!("{name}:{value}\n"));
        names.push(*name);
        if *name == "x-amz-date" {
            time = value;
        }
    }
    let names = names.join(";");
    canonical.push_str(&format!("\n{names}\n{}", sha256(body)));
    let date = time.split('T').next().unwrap_or_default();
    let scope = format!("{date}/{region}/ecr/aws4_request");
    let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", sha256(&canonical));
    let mut key = format!("AWS4{secret}").into_bytes();
    for part in [date, region, "ecr", "aws4_request", &text] {
        let hmac_key = hmac::Key::new(hmac::HMAC_SHA256, &key);
        key = hmac::sign(&hmac_key, part.as_bytes()).as_ref().to_vec();
    }
    format!(
        "AWS4-HMAC-SHA256 Credential={id}/{scope}, SignedHeaders={names}, Signature={}",
        hexadecimal(&key)
    )
}

fn sha256(text: &str) -> String {
    hexadecimal(digest::digest(&digest::SHA256, text.as_bytes()).as_ref())
}

fn hexadecimal(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// Returns a signed assertion for a token server. `None` if the private key is invalid.
fn assertion(account: &ServiceAccount, now: u64) -> Option<String> {
    let header = json!({ "alg": "RS256", "typ": "JWT", "kid": account.private_key_id });
    let claims = json!({
        "iss": account.client_email,
        "scope": GOOGLE_SCOPE,
        "aud": account.token_uri,
        "iat": now,
        "exp": now + ASSERTION_S,
    });
    let part = |value: serde_json::Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let signed = format!("{}.{}", part(header), part(claims));
    // PEM: base64 between lines of dashes.
    let lines = account.private_key.lines().map(str::trim);
    let base64: String = lines.filter(|line| !line.starts_with("-----")).collect();
    let key = RsaKeyPair::from_pkcs8(&STANDARD.decode(base64).ok()?).ok()?;
    let mut signature = vec![0; key.public().modulus_len()];
    let random = SystemRandom::new();
    key.sign(
        &RSA_PKCS1_SHA256,
        &random,
        signed.as_bytes(),
        &mut signature,
    )
    .ok()?;
    Some(format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature)))
}

#[cfg(test)]
mod tests;
