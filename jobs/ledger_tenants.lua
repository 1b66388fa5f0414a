-- Scripts on tenants' quotas. The key layout and the prelude are in ledger.lua. None of them is passed by a
-- full Redis: who wants more is refused anyway then.

--@ reserve
-- id, tenant, requests, tokens, most requests or '', most tokens or '', ms to enter the job in. Returns
-- nothing, or what is exceeded and how much of it is taken. Twice: the job's own place is not counted.
local open, most = key.open .. ':' .. ARGV[2], {requests = ARGV[5], tokens = ARGV[6]}
for _, old in ipairs(call('ZRANGEBYSCORE', open, '-inf', now)) do  -- reserved, but never entered
  call('ZREM', open, old)
  call('HDEL', key.open_requests, old)
  call('HDEL', key.open_tokens, old)
end
local wanted, ids = {requests = tonumber(ARGV[3]), tokens = tonumber(ARGV[4])}, call('ZRANGE', open, 0, -1)
for _, what in ipairs({'requests', 'tokens'}) do
  local taken = 0
  for place, found in ipairs(many('HMGET', key['open_' .. what], ids)) do
    if found and ids[place] ~= id then taken = taken + math.max(0, tonumber(found)) end
  end
  if most[what] ~= '' and taken + wanted[what] > tonumber(most[what]) then return {what, taken} end
end
if call('ZADD', open, 'NX', now + ARGV[7], id) == 1 then
  call('HSET', key.open_requests, id, ARGV[3])
  call('HSET', key.open_tokens, id, ARGV[4])
end
return {}

--@ give_back
-- id, tenant. Only what was reserved: a job that was entered since stays.
local open = key.open .. ':' .. ARGV[2]
local score = call('ZSCORE', open, id)
if score and score ~= 'inf' then
  call('ZREM', open, id)
  free()
end
return 0

--@ pass
-- '', tenant, requests a minute. Returns 0, or the ms after which to try again: a minute's requests may come at
-- once, then one whenever the rate allows it. Twice: counts twice, which costs the tenant one request.
local name, gap = key.rate .. ':' .. ARGV[2], 60000 / ARGV[3]
-- It never lies further ahead, unless the clock was set back.
local paid = math.max(now, math.min(tonumber(call('GET', name) or 0), now + 60000))
local wait = paid + gap - now - 60000
if wait > 0 then return math.ceil(wait) end
call('SET', name, string.format('%.17g', paid + gap), 'PX', math.ceil(paid + gap - now))
return 0

--@ hold_bytes
-- '', tenant, id of an upload, its bytes, ms that it may take. Returns the bytes of the others that are being
-- stored.
local name, bytes = key.uploads .. ':' .. ARGV[2], 0
call('ZREMRANGEBYSCORE', name, '-inf', now)
for _, held in ipairs(call('ZRANGE', name, 0, -1)) do
  local upload, size = string.match(held, '^(.-)|(%d+)$')
  if upload ~= ARGV[3] then bytes = bytes + size end
end
call('ZADD', name, now + ARGV[5], ARGV[3] .. '|' .. ARGV[4])
return bytes

--@ let_bytes_go
-- '', tenant, id of an upload, its bytes
call('ZREM', key.uploads .. ':' .. ARGV[2], ARGV[3] .. '|' .. ARGV[4])
return 0
